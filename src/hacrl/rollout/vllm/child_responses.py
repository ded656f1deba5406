"""Responses of vLLM in this process, gathered as its engine says them, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Response:
    """As far as it was said."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Responses:
    """Those under way in a ``vllm.LLM``'s engine.

    vLLM's own way from token ids to a response (``LLMEngine.step``) does for every token what is needed once
    for a response: here it is told of the last token alone.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._under_way: dict[str, Response] = {}
        self._asked = 0

    def ask(self, prompt: Any, params: Any) -> str:
        """For a response; its name."""
        self._asked += 1
        name: str = self._engine.add_request(str(self._asked), prompt, params)
        self._under_way[name] = Response()
        return name

    def step(self) -> dict[str, Response]:
        """Compute a token of each; those that have ended."""
        ended, last = {}, []
        for output in self._engine.engine_core.get_output().outputs:
            response = self._under_way.get(output.request_id)
            if response is None:  # it was left
                continue
            response.token_ids += output.new_token_ids
            if output.new_logprobs is not None:  # (tokens, 1 + ...): the sampled token's stands first
                response.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                ended[output.request_id] = self._under_way.pop(output.request_id)
                last.append(output)
        if last:
            self._engine.output_processor.process_outputs(last)  # it forgets them
        return ended

    def are_under_way(self) -> bool:
        """Whether any of those asked for has not ended."""
        return bool(self._under_way)

    def leave(self) -> None:
        """All that are under way."""
        names = list(self._under_way)
        self._under_way.clear()
        self._engine.abort_request(names, internal=True)
