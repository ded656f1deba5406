"""Sample with the agent's own transformers model: the prompt is prefilled once for all its responses.

On a GPU each response is decoded at its own pace, in recorded graphs, and one that ends makes room for
another (``continuous_batching``). On a CPU, and for models whose attention cannot do that, a batch is decoded
in step (``batch_decoding``). Models with recurrent or convolution layers generate through transformers'
``generate`` (``plain_generation``).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample
from hacrl.engines.hf.batch_decoding import BatchDecoding, decodes_in_step
from hacrl.engines.hf.continuous_batching import (
    FinishedRequest,
    Interrupted,
    NotFinite,
    PendingRequests,
    Request,
    decode_all,
)
from hacrl.engines.hf.live_update import LiveUpdate, spans_of_tokens
from hacrl.engines.hf.plain_generation import generate_plainly, generates_with_cache
from hacrl.engines.hf.slot_cache import should_keep, slots_that_fit, supports_slots
from hacrl.engines.hf.slot_decoder import CannotRecord, SlotDecoder
from hacrl.engines.hf.stop_watch import StopWatch
from hacrl.errors import ModelError, TrainingError
from hacrl.models.compile import compiles_by_default
from hacrl.models.device import current_device, free_failed_attempt, is_out_of_memory
from hacrl.models.keyed_noise import token_keys
from hacrl.models.sampling import draw
from hacrl.seeding import derive_seed
from hacrl.types import Sampling

_DecoderKey = tuple[Sampling, frozenset[int], bool]
LENGTH_STEP = 64  # slots are this many tokens long, or a multiple of it, so that the next step's fit as well


class TransformersEngine:
    """Samples with the learner's own weights.

    ``max_batch``: most responses decoded side by side. ``continuous``: whether to decode with continuous
    batching; None finds out. ``compiles``: whether to compile layers; None: where learners do by default.
    ``live_update``: where the weights may change between two tokens; samples then have their versions.
    """

    shares_weights = True
    runs_concurrently = False
    updates_while_generating = False
    follows_policy = True

    def __init__(
        self,
        policy: Policy,
        max_batch: int = 512,
        continuous: bool | None = None,
        compiles: bool | None = None,
        live_update: LiveUpdate | None = None,
    ) -> None:
        self.policy = policy
        self.max_batch = max_batch  # halved whenever memory runs out
        self.notes: list[str] = []  # sentences for the user
        self._continuous = continuous
        self._compiles = compiles
        self._live_update = live_update
        self.decoders: dict[_DecoderKey, SlotDecoder] = {}  # with their graphs, for the next step

    def check_generation(self) -> None:
        """Find out how the model can generate. Raise ModelError, before anything is written, if it cannot."""
        model, name = self.policy.model, self.policy.name
        with current_device(self.policy.device):
            try:
                if decodes_in_step(model) or generates_with_cache(model):
                    return
            except ModelError as error:
                raise ModelError(f"agent {name!r}: {error}") from error
        self.notes.append(
            f"agent {name!r}: {type(model).__name__} does not compute the same with a cache as without, so "
            "every token computes its whole sequence, which is slow. agent_defaults.engine=vllm may help"
        )

    def sync(self, proven: bool = True) -> None:
        """Do nothing: the engine computes with the learner's weights."""

    @torch.inference_mode()
    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`."""
        request.check_lengths(self.policy.name, self.policy.context_length)
        with current_device(self.policy.device):
            if self._continuous is None:
                self._continuous = self.policy.device.type == "cuda" and supports_slots(self.policy.model)
            generate = self._generate_continuously if self._continuous else self._generate_in_batches
            return generate(request, on_finished or (lambda _: None))

    def _generate_continuously(self, request: GenerationRequest, on_finished: OnFinished) -> list[Sample]:
        """Decode every response at its own pace. Responses that had finished when memory ran out are kept."""
        pending = PendingRequests(
            list(request.prompts),
            request.samples_per_prompt,
            request.limit,
            request.response_seeds,
        )
        samples: dict[int, Sample] = {}
        seed = request.seed

        def on_ended(ended: Sequence[FinishedRequest]) -> None:
            whole = [pending.finish(waiting, tokens) for waiting, tokens in ended]
            finished = [
                (waiting.index, Sample(tuple(tokens.token_ids), tuple(tokens.logprobs), tokens.versions))
                for (waiting, _), tokens in zip(ended, whole, strict=True)
            ]
            samples.update(finished)
            on_finished(finished)

        while missing := pending.unfinished:
            try:
                decoder = self._decoder_for(missing, request)
                decode_all(decoder, missing, seed, on_ended, self._live_update, request.stop_strings)
                self._note_compile_problems()
            except NotFinite:
                self.close()  # with the numbers in the cache
                raise self._not_finite() from None
            except CannotRecord as error:
                self._fall_back_to_batches(error)
                return self._generate_in_batches(request, on_finished)
            except (Interrupted, RuntimeError) as error:
                if isinstance(error, Interrupted):
                    pending.interrupt(error.running)
                elif not is_out_of_memory(error):
                    raise
                self._shrink_after(missing, request, error)
                seed = derive_seed(seed, "again")  # not what was drawn for others
        return [samples[index] for index in sorted(samples)]

    def _fall_back_to_batches(self, error: CannotRecord) -> None:
        self.close()
        self._continuous = False
        self.notes.append(
            f"agent {self.policy.name!r}: decoding could not be recorded as a CUDA graph ({error}), "
            "so responses are decoded in step, which is slower"
        )

    def _shrink_after(self, missing: Sequence[Request], request: GenerationRequest, error: Exception) -> None:
        """Free the decoder's memory and make the next attempt smaller than the last one."""
        last = self.decoders.get(_decoder_key(request))
        side_by_side = self._slots(len(missing)) if last is None else last.active_slots
        del last
        self.decoders.clear()
        free_failed_attempt(error, self.policy.device)
        self._halve_batch(side_by_side, missing[0].prompt, request.sampling, error)

    def _decoder_for(self, missing: Sequence[Request], request: GenerationRequest) -> SlotDecoder:
        """Return the last decoder if its slots are large enough, else a new one."""
        longest = max(len(waiting.prompt) + waiting.limit for waiting in missing)
        length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        slots, model, key = self._slots(len(missing)), self.policy.model, _decoder_key(request)
        kept = self.decoders.get(key)
        if kept is None or not kept.can_serve(slots, length):
            kept = None  # the new decoder needs its memory
            self.decoders.pop(key, None)
            compiles = compiles_by_default(model) if self._compiles is None else self._compiles
            fitting = min(slots, slots_that_fit(model, length))
            is_keyed = request.response_seeds is not None
            kept = SlotDecoder(
                model, fitting, length, request.sampling, sorted(request.stop_ids), compiles, is_keyed
            )
            kept.requested_slots = slots
            self.decoders[key] = kept
        kept.active_slots = min(slots, kept.cache.slots)
        return kept

    def _note_compile_problems(self) -> None:
        problems = [decoder.compile_error for decoder in self.decoders.values() if decoder.compile_error]
        if problems and self._compiles is not False:
            self._compiles = False
            self.notes.append(
                f"agent {self.policy.name!r}: its layers could not be compiled for decoding ({problems[0]}), "
                "which is slower than it could be. learning.compile=false says that it need not be tried"
            )

    def _slots(self, responses: int) -> int:
        return min(self.max_batch, responses)

    def _generate_in_batches(self, request: GenerationRequest, on_finished: OnFinished) -> list[Sample]:
        """Decode one batch after the other, all responses of a batch in step."""
        samples: list[Sample] = []
        generator = torch.Generator(device=self.policy.device).manual_seed(request.seed)
        while len(samples) < request.num_samples:
            prompts, responses = self._next_batch(request, len(samples))
            start = generator.get_state()
            try:
                finished = self._generate_batch(prompts, responses, request, generator, len(samples))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                free_failed_attempt(error, self.policy.device)
                self._halve_batch(len(prompts) * responses, prompts[0], request.sampling, error)
                generator.set_state(start)
                continue
            on_finished(list(enumerate(finished, start=len(samples))))
            samples += finished
        return samples

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self.notes = self.notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """Return the largest batch that fits; JSON-ready."""
        return {"max_batch": self.max_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned; the state of another kind of engine is ignored."""
        self.max_batch = state.get("max_batch", self.max_batch)

    def sleep(self) -> None:
        """Free the KV cache, unless it is small: recording CUDA graphs again takes a moment."""
        if not should_keep([decoder.cache for decoder in self.decoders.values()]):
            self.close()

    def close(self) -> None:
        """Free the KV caches and the graphs that use them."""
        if self.decoders:
            self.decoders.clear()
            gc.collect()
            torch.cuda.empty_cache()

    def _next_batch(self, request: GenerationRequest, done: int) -> tuple[Sequence[tuple[int, ...]], int]:
        """Return prompts and the number of responses to each: whole groups if they fit, else part of one."""
        group = request.samples_per_prompt
        first, sampled = divmod(done, group)
        if self.max_batch < group:
            return request.prompts[first : first + 1], min(self.max_batch, group - sampled)
        return request.prompts[first : first + self.max_batch // group], group

    def _halve_batch(
        self, responses: int, prompt: Sequence[int], sampling: Sampling, error: Exception
    ) -> None:
        """Halve ``max_batch`` until a batch like the one that did not fit would be smaller."""
        name, device = self.policy.name, self.policy.device
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

    def _check_logits(self, logits: Tensor) -> int | None:
        """Return the version of the weights that gave these logits, then let the weights change.

        Return None if they never change. Raise an error that names the agent if logits are not finite:
        sampling from NaN would fail without the name.
        """
        if not bool(logits.isfinite().all()):
            raise self._not_finite()
        if self._live_update is None:
            return None
        self._live_update.count_step()
        version = self._live_update.version
        self._live_update.end_of_token()
        return version

    def _not_finite(self) -> TrainingError:
        return TrainingError(
            f"agent {self.policy.name!r} gives logits that are not finite after "
            f"{self.policy.policy_version} updates: its weights are damaged or have diverged; check them, "
            "or lower learning.lr"
        )

    def _generate_batch(
        self,
        prompts: Sequence[tuple[int, ...]],
        group: int,
        request: GenerationRequest,
        generator: torch.Generator,
        first: int,  # index of the first response
    ) -> list[Sample]:
        seeds = None
        if request.response_seeds is not None:
            own = request.response_seeds[first : first + len(prompts) * group]
            seeds = torch.tensor(own, device=self.policy.device)
        limits = [request.limit(index) for index in range(first, first + len(prompts) * group)]
        if not decodes_in_step(self.policy.model):
            found = generate_plainly(
                self.policy.model,
                prompts,
                group,
                request.sampling,
                sorted(request.stop_ids),
                generator,
                self._check_logits,
                seeds,
                request.stop_strings,
                limits,
            )
            return [Sample(tuple(ids), tuple(logprobs), versions) for ids, logprobs, versions in found]
        decoding = BatchDecoding(self.policy.model, prompts, group)
        stop_ids = torch.tensor(sorted(request.stop_ids), device=self.policy.device)
        versions: list[int] = []  # of the weights that gave each step's logits
        watch = None if request.stop_strings is None else StopWatch(request.stop_strings)
        limits_B = torch.tensor(limits, device=self.policy.device)
        for position in range(max(limits)):
            version = self._check_logits(decoding.logits)
            if version is not None:
                versions.append(version)
            keys = None if seeds is None else token_keys(seeds[decoding.rows], position)
            token_ids, logprobs = draw(decoding.logits, request.sampling, generator, keys)
            stopped = torch.isin(token_ids, stop_ids) | (limits_B[decoding.rows] <= position + 1)
            if watch is not None:
                stopped |= watch.ended(decoding.rows, token_ids, decoding.running)
            decoding.append(token_ids, logprobs, stopped)
            if decoding.all_stopped:
                break
            decoding.forward(token_ids)
        return [
            Sample(tuple(ids), tuple(logprobs), spans_of_tokens(versions[: len(ids)]))
            for ids, logprobs in decoding.responses()
        ]


def _decoder_key(request: GenerationRequest) -> _DecoderKey:
    return request.sampling, request.stop_ids, request.response_seeds is not None
