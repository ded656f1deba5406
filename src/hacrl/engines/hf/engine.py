"""Sample with the agent's own transformers model: the prompt is prefilled once for all its responses.

On a GPU each response is decoded at its own pace, in recorded graphs, and one that ends makes room for
another (``continuous_batching``). On a CPU, and for models whose attention cannot do that, a batch is decoded
in step (``batch_decoding``).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hacrl.engines.base import Finished
from hacrl.engines.hf.batch_decoding import BatchDecoding
from hacrl.engines.hf.continuous_batching import (
    FinishedRequest,
    Interrupted,
    NotFinite,
    PendingRequests,
    Request,
    decode_all,
)
from hacrl.engines.hf.slot_cache import should_keep, slots_that_fit, supports_slots
from hacrl.engines.hf.slot_decoder import CannotRecord, SlotDecoder
from hacrl.errors import ModelError, TrainingError
from hacrl.models.agent import Agent
from hacrl.models.compile import worth_compiling
from hacrl.models.device import as_current, is_out_of_memory, let_go
from hacrl.models.sampling import draw
from hacrl.seeding import derive_seed
from hacrl.types import Problem, Rollout, Sampling

LENGTH_STEP = 64  # slots are this many tokens long, or a multiple of it, so that the next step's fit as well


class TransformersEngine:
    """Samples with the learner's own weights.

    ``continuous``: as on a GPU, or not; None finds out. ``compiles``: with compiled layers; None: where the
    learner's are by default.
    """

    def __init__(
        self,
        agent: Agent,
        max_batch: int = 512,
        continuous: bool | None = None,
        compiles: bool | None = None,
    ) -> None:
        self.agent = agent
        self.max_batch = max_batch  # most responses decoded side by side; fewer once memory has run out
        self.notes: list[str] = []  # sentences for the user
        self._continuous = continuous
        self._compiles = compiles
        self._decoders: dict[Sampling, SlotDecoder] = {}  # with their graphs, for the next step

    @property
    def shares_weights(self) -> bool:
        """Yes: it is the learner's model."""
        return True

    @property
    def is_apart(self) -> bool:
        """No: it computes where learners do."""
        return False

    def prepare(self, proven: bool = True) -> None:
        """Always ready."""

    @torch.inference_mode()
    def generate(
        self,
        problems: Sequence[Problem],
        samples_per_prompt: int,
        sampling: Sampling,
        seed: int,
        on_finished: Finished | None = None,
    ) -> list[Rollout]:
        """See :class:`hacrl.engines.base.RolloutEngine`."""
        self._check_context(problems, sampling)
        with as_current(self.agent.device):
            if self._continuous is None:
                self._continuous = self.agent.device.type == "cuda" and supports_slots(self.agent.model)
            generate = self._continuously if self._continuous else self._in_step
            return generate(problems, samples_per_prompt, sampling, seed, on_finished or (lambda *_: None))

    def _continuously(
        self, problems: Sequence[Problem], group: int, sampling: Sampling, seed: int, on_finished: Finished
    ) -> list[Rollout]:
        """Every response at its own pace; those that had ended when memory ran out are kept."""
        prompts = [self.agent.encode_prompt(problem) for problem in problems]
        asked = PendingRequests(prompts, group, sampling.max_new_tokens)
        rollouts: dict[int, Rollout] = {}

        def report(ended: Sequence[FinishedRequest]) -> None:
            whole = [asked.finish(request, said) for request, said in ended]
            made = self._rollouts(
                [
                    (problems[request.index // group], said.token_ids, said.logprobs)
                    for (request, _), said in zip(ended, whole, strict=True)
                ]
            )
            for (request, _), rollout in zip(ended, made, strict=True):
                rollouts[request.index] = rollout
                on_finished(request.index, rollout)

        while missing := asked.unfinished:
            try:
                decode_all(self._decoder_for(missing, sampling), missing, seed, report)
                self._note_what_is_not_compiled()
            except NotFinite:
                self.close()  # with the numbers in the cache
                raise self._not_finite() from None
            except CannotRecord as error:
                self._decode_in_step_from_now_on(error)
                return self._in_step(problems, group, sampling, seed, on_finished)
            except (Interrupted, RuntimeError) as error:
                if isinstance(error, Interrupted):
                    asked.interrupt(error.running)
                elif not is_out_of_memory(error):
                    raise
                self._make_room(missing, sampling, error)
                seed = derive_seed(seed, "again")  # not what was drawn for others
        return [rollouts[place] for place in sorted(rollouts)]

    def _decode_in_step_from_now_on(self, error: CannotRecord) -> None:
        self.close()
        self._continuous = False
        self.notes.append(
            f"agent {self.agent.name!r}: decoding could not be recorded as a CUDA graph ({error}), "
            "so responses are decoded in step, which is slower"
        )

    def _make_room(self, missing: Sequence[Request], sampling: Sampling, error: Exception) -> None:
        """The next attempt is to be smaller than the last one was."""
        last = self._decoders.get(sampling)
        side_by_side = self._slots(len(missing)) if last is None else last.active_slots
        del last
        self._decoders.clear()
        let_go(error, self.agent.device)
        self._take_fewer(side_by_side, missing[0].prompt, sampling, error)

    def _decoder_for(self, requests: Sequence[Request], sampling: Sampling) -> SlotDecoder:
        """The last one if it will do, else a new one."""
        longest = max(len(request.prompt) + request.limit for request in requests)
        length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        slots, model = self._slots(len(requests)), self.agent.model
        kept = self._decoders.get(sampling)
        if kept is None or not kept.can_serve(slots, length):
            kept = None  # its memory is the next one's
            self._decoders.pop(sampling, None)
            compiles = worth_compiling(model) if self._compiles is None else self._compiles
            fitting = min(slots, slots_that_fit(model, length))
            kept = SlotDecoder(model, fitting, length, sampling, sorted(self.agent.stop_ids), compiles)
            kept.requested_slots = slots
            self._decoders[sampling] = kept
        kept.active_slots = min(slots, kept.cache.slots)
        return kept

    def _note_what_is_not_compiled(self) -> None:
        problems = [decoder.compile_error for decoder in self._decoders.values() if decoder.compile_error]
        if problems and self._compiles is not False:
            self._compiles = False
            self.notes.append(
                f"agent {self.agent.name!r}: its layers could not be compiled for decoding ({problems[0]}), "
                "which is slower than it could be. rollout.compile=false says that it need not be tried"
            )

    def _slots(self, responses: int) -> int:
        return min(self.max_batch, responses)

    def _in_step(
        self, problems: Sequence[Problem], group: int, sampling: Sampling, seed: int, on_finished: Finished
    ) -> list[Rollout]:
        """Batch after batch."""
        rollouts: list[Rollout] = []
        generator = torch.Generator(device=self.agent.device).manual_seed(seed)
        while len(rollouts) < len(problems) * group:
            chunk, responses = self._next_chunk(problems, group, len(rollouts))
            start = generator.get_state()
            try:
                finished = self._generate_chunk(chunk, responses, sampling, generator)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                let_go(error, self.agent.device)
                prompt = self.agent.encode_prompt(chunk[0])
                self._take_fewer(len(chunk) * responses, prompt, sampling, error)
                generator.set_state(start)
                continue
            for rollout in finished:
                on_finished(len(rollouts), rollout)
                rollouts.append(rollout)
        return rollouts

    def take_notes(self) -> list[str]:
        """What the user should know, once."""
        notes, self.notes = self.notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """What lasts from step to step; JSON-ready."""
        return {"max_batch": self.max_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` gave; another kind of engine's has nothing for this one."""
        self.max_batch = state.get("max_batch", self.max_batch)

    def rest(self) -> None:
        """Give caches back, unless they are small: recording graphs anew takes a moment."""
        if not should_keep([decoder.cache for decoder in self._decoders.values()]):
            self.close()

    def close(self) -> None:
        """Let go of caches and the graphs that go with them."""
        if self._decoders:
            self._decoders.clear()
            gc.collect()
            torch.cuda.empty_cache()

    def _check_context(self, problems: Sequence[Problem], sampling: Sampling) -> None:
        limit = self.agent.context_length
        for problem in problems:
            needed = len(self.agent.encode_prompt(problem)) + sampling.max_new_tokens
            if limit is not None and needed > limit:
                raise ModelError(
                    f"agent {self.agent.name!r}: problem {problem.id!r} and max_new_tokens="
                    f"{sampling.max_new_tokens} need {needed} tokens, the model's context has {limit}: "
                    "use shorter prompts or fewer new tokens"
                )

    def _next_chunk(
        self, problems: Sequence[Problem], group: int, done: int
    ) -> tuple[Sequence[Problem], int]:
        """Whole groups if they fit, else as much of one as does: problems, and responses to each."""
        place, said = divmod(done, group)
        if self.max_batch < group:
            return problems[place : place + 1], min(self.max_batch, group - said)
        return problems[place : place + self.max_batch // group], group

    def _take_fewer(
        self, responses: int, prompt: Sequence[int], sampling: Sampling, error: Exception
    ) -> None:
        """Halve, until a batch like the one that did not fit would be smaller."""
        name, device = self.agent.name, self.agent.device
        if responses == 1:
            tokens = len(prompt) + sampling.max_new_tokens
            raise TrainingError(
                f"agent {name!r}: a single response of up to {tokens} tokens, prompt included, did not fit "
                f"into the memory of {device} beside what else is there. Give the agent a device of its own "
                f"(agents.{name}.device), agents.{name}.precision=bfloat16, or fewer rollout.max_new_tokens"
            ) from error
        before = self.max_batch
        while self.max_batch >= responses:
            self.max_batch //= 2
        self.notes.append(
            f"agent {name!r}: {responses} responses side by side did not fit into the memory of {device}; "
            f"rollout.max_batch counts as {self.max_batch} instead of {before} from now on. Nothing is lost"
        )

    def _check_finite(self, logits: Tensor) -> None:
        """A model that answers NaN has no next token; sampling would fail without saying whose it was."""
        if not bool(logits.isfinite().all()):
            raise self._not_finite()

    def _not_finite(self) -> TrainingError:
        return TrainingError(
            f"agent {self.agent.name!r} gives logits that are not finite after "
            f"{self.agent.policy_version} updates: its weights are damaged or have diverged; check them, "
            "or lower learning.lr"
        )

    def _generate_chunk(
        self, problems: Sequence[Problem], group: int, sampling: Sampling, generator: torch.Generator
    ) -> list[Rollout]:
        decoding = BatchDecoding(self.agent.model, [self.agent.encode_prompt(p) for p in problems], group)
        stop_ids = torch.tensor(sorted(self.agent.stop_ids), device=self.agent.device)
        for remaining in reversed(range(sampling.max_new_tokens)):
            self._check_finite(decoding.logits)
            token_ids, logprobs = draw(decoding.logits, sampling, generator)
            stopped = torch.isin(token_ids, stop_ids)
            decoding.append(token_ids, logprobs, stopped)
            if decoding.all_stopped or not remaining:
                break
            decoding.forward(token_ids)
        return self._rollouts(
            [
                (problems[row // group], ids, logprobs)
                for row, (ids, logprobs) in enumerate(decoding.responses())
            ]
        )

    def _rollouts(self, responses: Sequence[tuple[Problem, list[int], list[float]]]) -> list[Rollout]:
        stopped = [ids[-1] in self.agent.stop_ids for _, ids, _ in responses]
        prompts = [self.agent.encode_prompt(problem) for problem, _, _ in responses]
        texts = self.agent.decode_responses(
            [ids[:-1] if stop else ids for (_, ids, _), stop in zip(responses, stopped, strict=True)],
            prompts,
        )
        return [
            Rollout.single_turn(
                problem=problem,
                agent=self.agent.name,
                text=text,
                token_ids=tuple(ids),
                token_logprobs=tuple(logprobs),
                finish_reason="stop" if stop else "length",
                policy_version=self.agent.policy_version,
                tokenizer=self.agent.tokenizer_fingerprint,
                prompt_ids=prompt,
            )
            for (problem, ids, logprobs), prompt, text, stop in zip(
                responses, prompts, texts, stopped, strict=True
            )
        ]
