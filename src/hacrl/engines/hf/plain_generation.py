"""Generate with ``generate`` of transformers: for models with a state that padding would change.

Prompts of equal length are generated side by side, so nothing is padded. Each response computes its prompt
anew, because states of recurrent and convolution layers cannot be shared. Tokens are drawn, and their
log-probabilities computed, by the same functions as elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hacrl.engines.hf.live_update import spans_of_tokens
from hacrl.engines.hf.stop_watch import StopWatch
from hacrl.errors import ModelError
from hacrl.models.device import is_out_of_memory
from hacrl.models.keyed_noise import token_keys
from hacrl.models.lm_head import without_adapters
from hacrl.models.packing_support import logit_tolerance
from hacrl.models.sampling import draw, token_logprobs
from hacrl.models.stop_strings import StopStrings
from hacrl.types import Sampling, VersionSpans, first_tokens

# Token ids and log-probabilities of each response, and the policy versions of its tokens
Responses = list[tuple[list[int], list[float], VersionSpans]]
CheckLogits = Callable[[Tensor], int | None]  # returns the version of the weights that gave the logits
# Prompts of the trial, of equal length, and the tokens that it generates to each
_TRIAL_PROMPTS, _TRIAL_TOKENS = ((3, 1, 4, 1, 5), (2, 7, 1, 8, 2)), 6
_USES_CACHE: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def generate_plainly(
    model: Any,
    prompts: Sequence[Sequence[int]],
    group: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    generator: torch.Generator,
    check: CheckLogits = lambda _: None,
    seeds: Tensor | None = None,
    stop_strings: StopStrings | None = None,
    limits: Sequence[int] | None = None,
) -> Responses:
    """Return ``group`` responses to each prompt, prompt by prompt. ``check`` sees all logits.

    Responses have policy versions if ``check`` returns them. ``seeds``: of every response, instead of the
    generator. Responses end with the token that completes a stop string. ``limits``: most tokens of every
    response, if they differ.
    """
    uses_cache = generates_with_cache(model)
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    responses: list[Responses] = [[] for _ in prompts]
    for length, numbers in by_length.items():
        rows = [prompts[number] for number in numbers for _ in range(group)]
        places = [number * group + place for number in numbers for place in range(group)]
        own_limits = [sampling.max_new_tokens if limits is None else limits[place] for place in places]
        longest = replace(sampling, max_new_tokens=max(own_limits))
        drawn = _Drawing(longest, generator, check, None if seeds is None else seeds[places])
        # Some models take a prompt of one token for the continuation of what they generated last.
        watch = None if stop_strings is None else StopWatch(stop_strings)
        _generate(model, rows, drawn, stop_ids, uses_cache and length > 1, watch)
        found = drawn.responses(stop_ids)
        ends = dict(enumerate(own_limits))
        for row, end in ({} if watch is None else watch.ended_at).items():
            ends[row] = min(end, ends[row])
        for row, end in ends.items():
            ids, logprobs, versions = found[row]
            found[row] = ids[:end], logprobs[:end], first_tokens(versions, end)
        for place, number in enumerate(numbers):
            responses[number] = found[place * group : (place + 1) * group]
    return [response for group_of_prompt in responses for response in group_of_prompt]


def generates_with_cache(model: Any) -> bool:
    """Return whether ``generate`` computes with a cache what the learner computes; found out once a model.

    If not, it computes the whole sequence for every token, which is slow and needs no cache. Raise ModelError
    if even that differs.
    """
    if model not in _USES_CACHE:
        problems = {}
        for uses_cache in (True, False):
            problem = _trial_problem(model, uses_cache)
            if problem is None:
                _USES_CACHE[model] = uses_cache
                break
            problems[uses_cache] = problem
        else:
            raise ModelError(
                f"{type(without_adapters(model)).__name__} cannot generate in transformers: "
                f"{problems[False]}. Let vLLM generate: engine: vllm"
            )
    return _USES_CACHE[model]


@torch.no_grad()
def _trial_problem(model: Any, uses_cache: bool) -> str | None:
    """Generate a few tokens; return how they differ from a forward pass over them, or None."""
    device, sampling = model.device, Sampling(_TRIAL_TOKENS)
    drawn = _Drawing(sampling, torch.Generator(device=device).manual_seed(0))
    try:
        _generate(model, _TRIAL_PROMPTS, drawn, (), uses_cache)
        found = drawn.responses(())
        sequences = [[*prompt, *ids] for prompt, (ids, _, _) in zip(_TRIAL_PROMPTS, found, strict=True)]
        ids = torch.tensor(sequences, device=device)
        logits = model(input_ids=ids, use_cache=False).logits[:, len(_TRIAL_PROMPTS[0]) - 1 : -1].float()
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"
    expected = token_logprobs(logits, ids[:, len(_TRIAL_PROMPTS[0]) :], sampling)
    generated = torch.tensor([logprobs for _, logprobs, _ in found], device=device)
    gap = float((generated - expected).abs().mean())
    if gap > logit_tolerance(model.dtype) * float(logits.std()):  # False for NaN: the engine reports that
        return f"its log-probabilities differ from those of a forward pass by {gap:.2g} on average"
    return None


def _generate(
    model: Any,
    rows: Sequence[Sequence[int]],
    drawing: _Drawing,
    stop_ids: Sequence[int],
    uses_cache: bool,
    watch: StopWatch | None = None,
) -> None:
    """Call ``generate`` for rows of equal length."""
    plain = without_adapters(model)
    ids = torch.tensor([list(row) for row in rows], device=model.device)
    settings = GenerationConfig(
        max_new_tokens=drawing.sampling.max_new_tokens,
        do_sample=False,  # the drawn token is the only one that is left to choose
        use_cache=uses_cache,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=next(iter(stop_ids), 0),  # behind a response's end
        disable_compile=True,
    )
    with _without_own_settings(plain):
        plain.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([] if watch is None else [_Ended(watch)]),
        )


@contextmanager
def _without_own_settings(model: Any) -> Iterator[None]:
    """Ignore the model's generation_config.json: it may, for example, penalise repetitions."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class _Ended(StoppingCriteria):  # type: ignore[misc, unused-ignore]
    """Ends rows that contain a stop string."""

    def __init__(self, watch: StopWatch) -> None:
        self._watch = watch

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return which rows have ended; called after every token."""
        rows = torch.arange(len(input_ids), device=input_ids.device)
        return self._watch.ended(rows, input_ids[:, -1], torch.ones_like(rows, dtype=torch.bool))


class _Drawing(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Draws each next token, and leaves ``generate`` no other one to choose."""

    def __init__(
        self,
        sampling: Sampling,
        generator: torch.Generator,
        check: CheckLogits = lambda _: None,
        seeds: Tensor | None = None,
    ) -> None:
        self.sampling = sampling
        self._seeds = seeds
        self._generator = generator
        self._check = check
        self._steps: list[tuple[Tensor, Tensor]] = []  # ids and log-probabilities, one per row
        self._versions: list[int] = []  # of the weights in each step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores that are finite for the drawn tokens only."""
        version = self._check(scores)
        if version is not None:
            self._versions.append(version)
        keys = None if self._seeds is None else token_keys(self._seeds, len(self._steps))
        token_ids, logprobs = draw(scores, self.sampling, self._generator, keys)
        self._steps.append((token_ids, logprobs))
        return torch.full_like(scores, -torch.inf).scatter(1, token_ids.unsqueeze(1), 0.0)

    def responses(self, stop_ids: Sequence[int]) -> Responses:
        """Return each row's tokens and log-probabilities, up to its first stop token."""
        ids_BT, logprobs_BT = (torch.stack(part, dim=1).tolist() for part in zip(*self._steps, strict=True))
        responses = []
        for ids, logprobs in zip(ids_BT, logprobs_BT, strict=True):
            end = next((place + 1 for place, token in enumerate(ids) if token in stop_ids), len(ids))
            responses.append((ids[:end], logprobs[:end], spans_of_tokens(self._versions[:end])))
        return responses
