"""``hacrl eval``: every model alone, on every benchmark, one model in memory at a time.

Everything that can be wrong is found before the first response: models, benchmarks, devices, prompts that do
not fit. Then each chunk of problems is asked, judged and written down, and only then the next is begun.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from hacrl.config.schema import BenchmarkSettings
from hacrl.engines.answering import Answerer
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.evaluation.benchmarks import BENCHMARKS
from hacrl.evaluation.chunks import Chunk
from hacrl.evaluation.folder import EvaluationFolder
from hacrl.evaluation.plan import EvaluationRequest, Pair, chunk_seed, plan_pairs
from hacrl.evaluation.results import Mark, PairResult, Results
from hacrl.evaluation.specs import OWN_TASK, ExamMaker, split_names
from hacrl.evaluation.tables import results_markdown
from hacrl.evaluation.targets import Candidate, default_output, looks_like_a_hub_id, resolve_targets
from hacrl.models.agent import Agent
from hacrl.models.device import check_device
from hacrl.runs.hub import cache_only_if_unreachable, data_needs_hub


class EvaluationObserver:
    """Told what happens; every method may be left out."""

    def on_start(self, folder: Path, pairs: int) -> None:
        """Everything is checked and the work begins."""

    def on_note(self, note: str) -> None:
        """Something the user should know."""

    def on_load(self, label: str) -> None:
        """A model is being loaded."""

    def on_progress(self, label: str, benchmark: str, done: int, total: int, reward: float | None) -> None:
        """So many responses of a pair are there, of this mean reward."""

    def on_score(self, pair: PairResult) -> None:
        """A pair is finished."""


def evaluate_targets(
    request: EvaluationRequest, observer: EvaluationObserver | None = None
) -> tuple[Results, Path]:
    """Evaluate; results and the folder they are in. An evaluation that was broken off goes on."""
    watch = observer or EvaluationObserver()
    device = _device(request.device)
    candidates = resolve_targets(request.targets, request.before)
    names = split_names(request.on) or [OWN_TASK]
    hub = cache_only_if_unreachable() if _needs_hub(candidates, names, request.data) else nullcontext()
    with hub, closing(ExamMaker(request.settings, request.data, request.prompt)) as maker:
        pairs, notes = plan_pairs(request, candidates, names, maker, device)
        folder = EvaluationFolder(request.output or default_output(candidates, names))
        records = [pair.record for pair in pairs]
        folder.check(records, request.overwrite)
        folder.open(records, {pair.record.key: pair.plan for pair in pairs}, request.overwrite)
        watch.on_start(folder.path, len(pairs))
        for note in notes:
            watch.on_note(note)
        return _run(pairs, notes, folder, request.settings, device, watch), folder.path


def _needs_hub(candidates: Sequence[Candidate], names: Sequence[str], data: Path | None) -> bool:
    """Whether a model or a benchmark may have to come from the hub."""
    if any(looks_like_a_hub_id(candidate.settings.model) for candidate in candidates):
        return True
    if data is None and any(name in BENCHMARKS for name in names):
        return True
    runs = [candidate.run for candidate in candidates if candidate.run is not None]
    return OWN_TASK in names and any(data_needs_hub(run.task) for run in runs)


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(asked, "--device")
    return asked


def _run(
    pairs: Sequence[Pair],
    notes: tuple[str, ...],
    folder: EvaluationFolder,
    settings: BenchmarkSettings,
    device: str,
    watch: EvaluationObserver,
) -> Results:
    results = Results((), settings.seed, notes)
    loaded: tuple[str, Agent, TransformersEngine] | None = None
    for pair in pairs:
        left = folder.chunks_left(pair.record.key, pair.plan)
        if left and (loaded is None or loaded[0] != pair.candidate.label):
            loaded = None  # the last model goes before the next one comes
            _free_memory()
            watch.on_load(pair.candidate.label)
            agent = Agent.load(pair.candidate.settings, device)
            most = max(chunk.responses for chunk in pair.plan.chunks)
            loaded = (pair.candidate.label, agent, TransformersEngine(agent, max(most, pair.exam.batch)))
            del agent
        _report_progress(pair, folder, watch)
        for chunk in left:
            assert loaded is not None
            folder.append(pair.record.key, *_answers(loaded[1], loaded[2], pair, chunk, settings.seed))
            for note in loaded[2].take_notes():
                watch.on_note(note)
            _report_progress(pair, folder, watch)
        result = pair.result(folder.marks(pair.record.key), settings)
        results = replace(results, pairs=(*results.pairs, result))
        folder.write_results(results.as_dict(), results_markdown(results))
        watch.on_score(result)
    return results


def _answers(
    agent: Agent, engine: TransformersEngine, pair: Pair, chunk: Chunk, seed: int
) -> tuple[list[Mark], list[str]]:
    """The chunk's responses, judged. Nothing outlives the call that would keep the model in memory."""
    problems = [pair.exam.problems[position] for position in chunk.positions]
    if not chunk.max_new_tokens:
        slots = [(pair.exam.problems[position].id, sample) for position, sample in chunk.slots]
        return [Mark(name, sample, 0.0, "unparsable", 0, "length") for name, sample in slots], [""] * len(
            slots
        )
    sampling = replace(pair.exam.sampling, max_new_tokens=chunk.max_new_tokens)
    chosen = chunk_seed(pair, chunk, seed)
    answerer = Answerer(agent, engine, pair.exam.task)
    verified = answerer.answer(problems, chunk.samples, sampling, chosen)
    marks = [
        Mark(
            one.rollout.problem.id,
            sample,
            one.reward,
            one.verdict.label,
            one.rollout.num_tokens,
            one.rollout.finish_reason,
        )
        for one, (_, sample) in zip(verified, chunk.slots, strict=True)
    ]
    return marks, [one.rollout.text for one in verified]


def _report_progress(pair: Pair, folder: EvaluationFolder, watch: EvaluationObserver) -> None:
    marks = folder.marks(pair.record.key)
    reward = sum(mark.reward for mark in marks) / len(marks) if marks else None
    watch.on_progress(pair.candidate.label, pair.exam.name, len(marks), pair.plan.responses, reward)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
