"""Plan an evaluation before the first response: every pair of model and benchmark, and its chunks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hacrl.config.schema import BenchmarkSettings
from hacrl.errors import ConfigError, ModelError
from hacrl.evaluation.chunks import Chunk, ChunkPlan, plan_chunks
from hacrl.evaluation.folder import PairRecord
from hacrl.evaluation.results import PairResult, ScoredResponse, score
from hacrl.evaluation.specs import BenchmarkSpec, BenchmarkSpecs
from hacrl.evaluation.targets import Target, looks_like_a_hub_id, weights_digest
from hacrl.models.loading import check_weights_exist, load_text_codec
from hacrl.models.tokenizing import TextCodec
from hacrl.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What ``hacrl eval`` is to evaluate, on which benchmarks, and where to write the results."""

    targets: tuple[str, ...]
    on: tuple[str, ...] = ()  # names of benchmarks; empty: the run's own task
    settings: BenchmarkSettings = field(default_factory=BenchmarkSettings)
    data: Path | None = None
    prompt: str | None = None
    columns: Mapping[str, str] = field(
        default_factory=dict
    )  # of files in ``on``: problem, answer or id -> name
    before: bool = False
    engine: str = "transformers"  # transformers, vllm, or module:attribute
    device: str = "auto"
    output: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class EvaluationPair:
    """One model and one benchmark, with everything that is decided before generation."""

    target: Target
    spec: BenchmarkSpec
    plan: ChunkPlan
    record: PairRecord

    def result(self, responses: Sequence[ScoredResponse], settings: BenchmarkSettings) -> PairResult:
        """Return the pair's result."""
        ks = settings.pass_at or ((self.spec.samples,) if self.spec.samples > 1 else ())
        study = None if self.target.stage == "before" else self.target.study
        return PairResult(
            label=self.target.label,
            agent=self.target.agent,
            stage=self.target.stage,
            run=None if self.target.folder is None else str(self.target.folder),
            origin=self.target.origin,
            variant=None if study is None else study.variant,
            run_seed=None if study is None else study.seed,
            model=self.target.settings.model,
            benchmark=self.spec.name,
            source=self.spec.source,
            temperature=self.spec.sampling.temperature,
            top_p=self.spec.sampling.top_p,
            stop=self.spec.sampling.stop,
            score=score(responses, self.plan, ks),
        )


def plan_pairs(
    request: EvaluationRequest,
    targets: Sequence[Target],
    names: Sequence[str],
    specs: BenchmarkSpecs,
    device: str,
) -> tuple[list[EvaluationPair], tuple[str, ...]]:
    """Check all pairs; return them in the order of the models, and notes for the user."""
    pairs = []
    notes: list[str] = []
    for target in targets:
        codec = _load_codec(target)  # first: without its folder, a run has no task either
        target_specs = [specs.build(name, target) for name in names]
        for name, count in Counter(spec.name for spec in target_specs).items():
            if count > 1:
                raise ConfigError(f"--on: two benchmarks are called {name!r}; rename one of the files")
        check_weights_exist(target.settings)
        weights = weights_digest(target.settings)
        for spec in target_specs:
            plan = _chunks_of_pair(spec, target, codec, request.settings)
            notes += _notes_on(plan, spec, target, codec)
            pairs.append(
                EvaluationPair(target, spec, plan, _record(spec, target, plan, request, device, weights))
            )
    return pairs, tuple(dict.fromkeys([*specs.notes, *notes]))


def _load_codec(target: Target) -> TextCodec:
    try:
        return load_text_codec(target.settings)
    except ModelError as error:
        model = target.settings.model
        if target.run is not None or not looks_like_a_hub_id(model):
            raise
        reason = str(error).removeprefix(f"agents.{target.settings.name}.model: ")
        raise ModelError(f"{model} is not a local folder, and as a hub model: {reason}") from error


def _chunks_of_pair(
    spec: BenchmarkSpec, target: Target, codec: TextCodec, settings: BenchmarkSettings
) -> ChunkPlan:
    """Return the chunks of a pair. Raise ConfigError if a length that the user gave does not fit."""
    lengths = [len(prompt) for prompt in codec.encode_prompts(spec.problems)]
    context, requested = codec.context_length, spec.sampling.max_new_tokens
    plan = plan_chunks(lengths, context, requested, spec.samples, spec.batch)
    if len(plan.unanswered) == len(lengths):
        raise ConfigError(
            f"{target.label} cannot answer {spec.name}: its context has {context} tokens, and the "
            f"shortest prompt has {min(lengths)}"
        )
    if settings.max_new_tokens and (plan.max_new_tokens < requested or plan.shortened):
        assert context is not None
        position = max((p for p, n in enumerate(lengths) if n < context), key=lambda p: lengths[p])
        raise ConfigError(
            f"--max-new-tokens {requested}: problem {spec.problems[position].id[:80]!r} of {spec.name} is "
            f"{lengths[position]} tokens long for {target.label}, whose context has {context}: at most "
            f"{context - lengths[position]} new tokens fit; omit --max-new-tokens to use what fits"
        )
    return plan


def _notes_on(plan: ChunkPlan, spec: BenchmarkSpec, target: Target, codec: TextCodec) -> list[str]:
    pair = f"{target.label} on {spec.name}"
    context = f"the context of {codec.context_length} tokens"
    notes = []
    if plan.max_new_tokens < spec.sampling.max_new_tokens:
        notes.append(
            f"{pair}: at most {plan.max_new_tokens} new tokens instead of {spec.sampling.max_new_tokens}, "
            f"because of {context}"
        )
    if plan.shortened:
        notes.append(
            f"{pair}: {len(plan.shortened)} long prompts get only the new tokens that {context} leaves"
        )
    if plan.unanswered:
        first = spec.problems[plan.unanswered[0]].id[:80]
        notes.append(
            f"{pair}: {len(plan.unanswered)} prompts do not fit into {context} and count as wrong, "
            f"e.g. {first!r}"
        )
    return notes


def _record(
    spec: BenchmarkSpec,
    target: Target,
    plan: ChunkPlan,
    request: EvaluationRequest,
    device: str,
    weights: str,
) -> PairRecord:
    agent = target.settings
    return PairRecord(
        agent=target.label,
        benchmark=spec.name,
        model=agent.model if agent.revision is None else f"{agent.model}@{agent.revision}",
        weights=weights,
        problem_count=len(spec.problems),
        problems=spec.digest,
        samples=spec.samples,
        temperature=spec.sampling.temperature,
        top_p=spec.sampling.top_p,
        stop=json.dumps(spec.sampling.stop),
        max_new_tokens=plan.max_new_tokens,
        seed=request.settings.seed,
        batch=spec.batch,
        engine=request.engine,
        device=device.partition(":")[0],
        precision=agent.precision,
        chat_template=agent.chat_template,
        chat_template_args=json.dumps(agent.chat_template_args, sort_keys=True),
    )


def chunk_seed(pair: EvaluationPair, chunk: Chunk, seed: int) -> int:
    """Return the seed of a chunk. It depends on agent, benchmark and chunk, not on what else is evaluated.

    The first chunk of a run's own task gets the seed of the run's own evaluation.
    """
    parts: tuple[str | int, ...] = ("evaluate", pair.target.agent, *pair.spec.seed_parts)
    if chunk is not pair.plan.chunks[0]:
        parts = (*parts, chunk.positions[0], chunk.first_sample)
    return derive_seed(seed, *parts)
