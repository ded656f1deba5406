"""An evaluation decided on in full before the first response: who is asked what, and whether it fits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hacrl.config.schema import BenchmarkSettings
from hacrl.errors import ConfigError, ModelError
from hacrl.evaluation.chunks import Chunk, ChunkPlan, plan_chunks
from hacrl.evaluation.folder import PairRecord
from hacrl.evaluation.results import Mark, PairResult, score
from hacrl.evaluation.specs import Exam, ExamMaker
from hacrl.evaluation.targets import Candidate, looks_like_a_hub_id, weights_digest
from hacrl.models.loading import check_weights_exist, load_text_codec
from hacrl.models.tokenizing import TextCodec
from hacrl.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Who is evaluated, on what, how, and where it is written."""

    targets: tuple[str, ...]
    on: tuple[str, ...] = ()  # benchmarks; empty: a run's own task
    settings: BenchmarkSettings = field(default_factory=BenchmarkSettings)
    data: Path | None = None
    prompt: str | None = None
    before: bool = False
    device: str = "auto"
    output: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Pair:
    """One model and one exam, with all that is decided before asking."""

    candidate: Candidate
    exam: Exam
    plan: ChunkPlan
    record: PairRecord

    def result(self, marks: Sequence[Mark], settings: BenchmarkSettings) -> PairResult:
        """The pair's numbers."""
        ks = settings.pass_at or ((self.exam.samples,) if self.exam.samples > 1 else ())
        return PairResult(
            label=self.candidate.label,
            agent=self.candidate.agent,
            stage=self.candidate.stage,
            run=None if self.candidate.folder is None else str(self.candidate.folder),
            model=self.candidate.settings.model,
            benchmark=self.exam.name,
            source=self.exam.source,
            temperature=self.exam.sampling.temperature,
            top_p=self.exam.sampling.top_p,
            score=score(marks, self.plan, ks),
        )


def plan_pairs(
    request: EvaluationRequest,
    candidates: Sequence[Candidate],
    names: Sequence[str],
    maker: ExamMaker,
    device: str,
) -> tuple[list[Pair], tuple[str, ...]]:
    """Every pair, checked, in the order of the models; and what the user should know about them."""
    pairs = []
    notes: list[str] = []
    for candidate in candidates:
        codec = _load_codec(candidate)  # first: a folder that is not there has no task either
        exams = [maker.make(name, candidate) for name in names]
        for name, count in Counter(exam.name for exam in exams).items():
            if count > 1:
                raise ConfigError(f"--on: two benchmarks are called {name!r}; rename one of the files")
        check_weights_exist(candidate.settings)
        weights = weights_digest(candidate.settings)
        for exam in exams:
            plan = _fit(exam, candidate, codec, request.settings)
            notes += _notes_on(plan, exam, candidate, codec)
            pairs.append(
                Pair(candidate, exam, plan, _record(exam, candidate, plan, request, device, weights))
            )
    return pairs, tuple(dict.fromkeys([*maker.notes, *notes]))


def _load_codec(candidate: Candidate) -> TextCodec:
    try:
        return load_text_codec(candidate.settings)
    except ModelError as error:
        model = candidate.settings.model
        if candidate.run is not None or not looks_like_a_hub_id(model):
            raise
        reason = str(error).removeprefix(f"agents.{candidate.settings.name}.model: ")
        raise ModelError(f"{model} is no folder here, and as a model of the hub: {reason}") from error


def _fit(exam: Exam, candidate: Candidate, codec: TextCodec, settings: BenchmarkSettings) -> ChunkPlan:
    """The chunks of a pair; a length the user asked for is never cut in silence."""
    lengths = [len(codec.encode_prompt(problem)) for problem in exam.problems]
    context, asked = codec.context_length, exam.sampling.max_new_tokens
    plan = plan_chunks(lengths, context, asked, exam.samples, exam.batch)
    if len(plan.unanswered) == len(lengths):
        raise ConfigError(
            f"{candidate.label} cannot be asked {exam.name}: its context has {context} tokens, and its "
            f"shortest problem needs {min(lengths)}"
        )
    if settings.max_new_tokens and (plan.max_new_tokens < asked or plan.shortened):
        assert context is not None
        position = max((p for p, n in enumerate(lengths) if n < context), key=lambda p: lengths[p])
        raise ConfigError(
            f"--max-new-tokens {asked}: problem {exam.problems[position].id[:80]!r} of {exam.name} is "
            f"{lengths[position]} tokens long for {candidate.label}, whose context has {context}: at most "
            f"{context - lengths[position]} new tokens fit; leave --max-new-tokens out to use what fits"
        )
    return plan


def _notes_on(plan: ChunkPlan, exam: Exam, candidate: Candidate, codec: TextCodec) -> list[str]:
    who = f"{candidate.label} on {exam.name}"
    context = f"the context of {codec.context_length} tokens"
    notes = []
    if plan.max_new_tokens < exam.sampling.max_new_tokens:
        notes.append(
            f"{who}: at most {plan.max_new_tokens} new tokens instead of {exam.sampling.max_new_tokens}, "
            f"for {context}"
        )
    if plan.shortened:
        notes.append(
            f"{who}: {len(plan.shortened)} long problems get only the new tokens that {context} leaves"
        )
    if plan.unanswered:
        first = exam.problems[plan.unanswered[0]].id[:80]
        notes.append(
            f"{who}: {len(plan.unanswered)} problems did not fit {context} and count as wrong, e.g. {first!r}"
        )
    return notes


def _record(
    exam: Exam, candidate: Candidate, plan: ChunkPlan, request: EvaluationRequest, device: str, weights: str
) -> PairRecord:
    agent = candidate.settings
    return PairRecord(
        agent=candidate.label,
        benchmark=exam.name,
        model=agent.model if agent.revision is None else f"{agent.model}@{agent.revision}",
        weights=weights,
        problem_count=len(exam.problems),
        problems=exam.digest,
        samples=exam.samples,
        temperature=exam.sampling.temperature,
        top_p=exam.sampling.top_p,
        max_new_tokens=plan.max_new_tokens,
        seed=request.settings.seed,
        batch=exam.batch,
        device=device.partition(":")[0],
        precision=agent.precision,
        chat_template=agent.chat_template,
        chat_template_args=json.dumps(agent.chat_template_args, sort_keys=True),
    )


def chunk_seed(pair: Pair, chunk: Chunk, seed: int) -> int:
    """Depends on agent, benchmark and chunk alone, not on what else is evaluated.

    The first chunk of a run's own task is drawn as in the run's own evaluation.
    """
    parts: tuple[str | int, ...] = ("evaluate", pair.candidate.agent, *pair.exam.seed_parts)
    if chunk is not pair.plan.chunks[0]:
        parts = (*parts, chunk.positions[0], chunk.first_sample)
    return derive_seed(seed, *parts)
