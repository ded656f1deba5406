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

from hacrl.config.schema import ExamSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.judging import ask_and_judge
from hacrl.evaluation.benchmarks import BENCHMARKS
from hacrl.evaluation.chunks import Chunk
from hacrl.evaluation.folder import EvaluationFolder
from hacrl.evaluation.plan import EvaluationPair, EvaluationRequest, chunk_seed, plan_pairs
from hacrl.evaluation.results import PairResult, Results, ScoredResponse
from hacrl.evaluation.specs import OWN_TASK, BenchmarkSpecs, split_names
from hacrl.evaluation.tables import results_markdown
from hacrl.evaluation.targets import Target, default_output, looks_like_a_hub_id, resolve_targets
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
    targets = resolve_targets(request.targets, request.before)
    names = split_names(request.on) or [OWN_TASK]
    hub = cache_only_if_unreachable() if _needs_hub(targets, names, request.data) else nullcontext()
    with hub, closing(BenchmarkSpecs(request.settings, request.data, request.prompt)) as specs:
        pairs, notes = plan_pairs(request, targets, names, specs, device)
        folder = EvaluationFolder(request.output or default_output(targets, names))
        records = [pair.record for pair in pairs]
        folder.check(records, request.overwrite)
        folder.open(records, {pair.record.key: pair.plan for pair in pairs}, request.overwrite)
        watch.on_start(folder.path, len(pairs))
        for note in notes:
            watch.on_note(note)
        return _run(pairs, notes, folder, request.settings, device, watch), folder.path


def _needs_hub(targets: Sequence[Target], names: Sequence[str], data: Path | None) -> bool:
    """Whether a model or a benchmark may have to come from the hub."""
    if any(looks_like_a_hub_id(target.settings.model) for target in targets):
        return True
    if data is None and any(name in BENCHMARKS for name in names):
        return True
    runs = [target.run for target in targets if target.run is not None]
    return OWN_TASK in names and any(data_needs_hub(run.task) for run in runs)


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(asked, "--device")
    return asked


def _run(
    pairs: Sequence[EvaluationPair],
    notes: tuple[str, ...],
    folder: EvaluationFolder,
    settings: ExamSettings,
    device: str,
    watch: EvaluationObserver,
) -> Results:
    results = Results((), settings.seed, notes)
    loaded: tuple[str, TransformersEngine] | None = None
    for pair in pairs:
        left = folder.chunks_left(pair.record.key, pair.plan)
        if left and (loaded is None or loaded[0] != pair.target.label):
            loaded = None  # the last model goes before the next one comes
            _free_memory()
            watch.on_load(pair.target.label)
            agent = Agent.load(pair.target.settings, device)
            most = max(chunk.response_count for chunk in pair.plan.chunks)
            loaded = (pair.target.label, TransformersEngine(agent, max(most, pair.spec.batch)))
            del agent
        _report_progress(pair, folder, watch)
        for chunk in left:
            assert loaded is not None
            folder.append(pair.record.key, *_answers(loaded[1], pair, chunk, settings.seed))
            for note in loaded[1].take_notes():
                watch.on_note(note)
            _report_progress(pair, folder, watch)
        result = pair.result(folder.responses(pair.record.key), settings)
        results = replace(results, pairs=(*results.pairs, result))
        folder.write_results(results.as_dict(), results_markdown(results))
        watch.on_score(result)
    return results


def _answers(
    engine: TransformersEngine, pair: EvaluationPair, chunk: Chunk, seed: int
) -> tuple[list[ScoredResponse], list[str]]:
    """The chunk's responses, judged. Nothing outlives the call that would keep the model in memory."""
    problems = [pair.spec.problems[position] for position in chunk.positions]
    if not chunk.max_new_tokens:
        slots = [(pair.spec.problems[position].id, sample) for position, sample in chunk.slots]
        return [ScoredResponse(name, sample, 0.0, "unparsable", 0, "length") for name, sample in slots], [
            ""
        ] * len(slots)
    sampling = replace(pair.spec.sampling, max_new_tokens=chunk.max_new_tokens)
    chosen = chunk_seed(pair, chunk, seed)
    verified = ask_and_judge(engine, pair.spec.task, problems, chunk.samples, sampling, chosen)
    responses = [
        ScoredResponse(
            one.rollout.problem.id,
            sample,
            one.reward,
            one.verdict.label,
            one.rollout.num_tokens,
            one.rollout.finish_reason,
        )
        for one, (_, sample) in zip(verified, chunk.slots, strict=True)
    ]
    return responses, [one.rollout.text for one in verified]


def _report_progress(pair: EvaluationPair, folder: EvaluationFolder, watch: EvaluationObserver) -> None:
    responses = folder.responses(pair.record.key)
    reward = sum(response.reward for response in responses) / len(responses) if responses else None
    watch.on_progress(pair.target.label, pair.spec.name, len(responses), pair.plan.response_count, reward)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
