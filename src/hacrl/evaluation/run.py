"""``hacrl eval``: evaluate every model alone on every benchmark, with one model in memory at a time.

Everything that can be wrong is found before the first response: models, engines, benchmarks, devices, prompts
that do not fit. Then the problems are answered, verified and written down chunk by chunk.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hacrl.config.schema import AgentSettings, BenchmarkSettings, RolloutSettings
from hacrl.engines.answering import Answerer
from hacrl.engines.base import Engine
from hacrl.engines.episodes import EpisodeAnswerer, make_answerer
from hacrl.engines.kinds import EngineSpec
from hacrl.engines.registry import engine_kind
from hacrl.engines.sync_check import NUM_PROBES
from hacrl.errors import ConfigError
from hacrl.evaluation.benchmarks import BENCHMARKS, looks_like_a_file
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
from hacrl.seeding import derive_seed

ENGINE_FOLDER = "engines"  # in the evaluation's folder: logs, and files that engines start from
USABLE_SHARE = 0.92  # of a GPU's free memory, for an engine beside the agent's own weights


class EvaluationObserver:
    """Receives an evaluation's events and does nothing. Subclasses override the events they use."""

    def on_start(self, folder: Path, pairs: int) -> None:
        """Handle the start: everything is checked."""

    def on_note(self, note: str) -> None:
        """Handle a sentence that the user should read."""

    def on_load(self, label: str) -> None:
        """Handle the start of loading a model."""

    def on_progress(self, label: str, benchmark: str, done: int, total: int, reward: float | None) -> None:
        """Handle progress: ``done`` of ``total`` responses of a pair are verified, with this mean reward."""

    def on_score(self, pair: PairResult) -> None:
        """Handle the result of a finished pair."""


def evaluate_targets(
    request: EvaluationRequest, observer: EvaluationObserver | None = None
) -> tuple[Results, Path]:
    """Return the results and their folder. An evaluation that was interrupted continues."""
    watch = observer or EvaluationObserver()
    device = _device(request.device)
    targets = resolve_targets(request.targets, request.before)
    for target in targets:
        engine_kind(request.engine).check(target.settings)
    names = split_names(request.on) or [OWN_TASK]
    hub = cache_only_if_unreachable() if _needs_hub(targets, names, request.data) else nullcontext()
    with hub, closing(_specs(request, names)) as specs:
        pairs, notes = plan_pairs(request, targets, names, specs, device)
        notes = (*notes, *_engine_notes(request.engine, targets, device))
        folder = EvaluationFolder(request.output or default_output(targets, names))
        records = [pair.record for pair in pairs]
        folder.check(records, request.overwrite)
        folder.open(records, {pair.record.key: pair.plan for pair in pairs}, request.overwrite)
        watch.on_start(folder.path, len(pairs))
        for note in notes:
            watch.on_note(note)
        evaluation = _Evaluation(request.engine, device, request.settings, folder, watch)
        return evaluation.run(pairs, notes), folder.path


def _specs(request: EvaluationRequest, names: Sequence[str]) -> BenchmarkSpecs:
    if request.columns and not any(looks_like_a_file(name) for name in names):
        raise ConfigError("--columns names the columns of a file: give one with --on FILE.jsonl")
    return BenchmarkSpecs(request.settings, request.data, request.prompt, request.columns)


def _needs_hub(targets: Sequence[Target], names: Sequence[str], data: Path | None) -> bool:
    """Return whether a model or a benchmark may have to come from the hub."""
    if any(looks_like_a_hub_id(target.settings.model) for target in targets):
        return True
    if data is None and any(name in BENCHMARKS for name in names):
        return True
    runs = [target.run for target in targets if target.run is not None]
    return OWN_TASK in names and any(data_needs_hub(run.task) for run in runs)


def _engine_notes(engine: str, targets: Sequence[Target], device: str) -> tuple[str, ...]:
    """Return what the user should know of the engines."""
    agents = {target.settings.name: target.settings for target in targets}
    return engine_kind(engine).notes(list(agents.values()), dict.fromkeys(agents, torch.device(device)))


def _device(setting: str) -> str:
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(setting, "--device")
    return setting


@dataclass
class _Evaluation:
    """One evaluation under way."""

    engine: str
    device: str
    settings: BenchmarkSettings
    folder: EvaluationFolder
    watch: EvaluationObserver

    def run(self, pairs: Sequence[EvaluationPair], notes: tuple[str, ...]) -> Results:
        """Evaluate model by model; write the results after every pair."""
        results = Results((), self.settings.seed, notes)
        for label in dict.fromkeys(pair.target.label for pair in pairs):
            results = self._evaluate([pair for pair in pairs if pair.target.label == label], results)
            free_memory()  # before the next model is loaded
        return results

    def _evaluate(self, pairs: Sequence[EvaluationPair], results: Results) -> Results:
        """Evaluate one model on all its benchmarks; load it only if there is something left to answer."""
        unfinished = [pair for pair in pairs if self.folder.chunks_left(pair.record.key, pair.plan)]
        agent = engine = None
        if unfinished:
            self.watch.on_load(pairs[0].target.label)
            agent = Agent.load(pairs[0].target.settings, self.device)
            engine = self._make_engine(agent, unfinished)
        try:
            for pair in pairs:
                if agent is not None and engine is not None:
                    self._answer(pair, agent, engine)
                result = pair.result(self.folder.responses(pair.record.key), self.settings)
                results = replace(results, pairs=(*results.pairs, result))
                self.folder.write_results(results.as_dict(), results_markdown(results))
                self.watch.on_score(result)
        finally:
            if engine is not None:
                engine.close()
        return results

    def _make_engine(self, agent: Agent, pairs: Sequence[EvaluationPair]) -> Engine:
        chunks = [(pair, chunk) for pair in pairs for chunk in pair.plan.chunks if chunk.max_new_tokens]
        largest = max([pair.spec.batch for pair in pairs] + [chunk.response_count for _, chunk in chunks])
        prompts = {
            (pair.record.key, position): (
                agent.encode_prompt(pair.spec.problems[position]),
                chunk.max_new_tokens,
            )
            for pair, chunk in chunks
            for position in chunk.positions
        }
        target = pairs[0].target
        stop = tuple(dict.fromkeys(text for pair in pairs for text in pair.spec.sampling.stop))
        spec = EngineSpec(
            agent=agent,
            settings=with_free_memory(target.settings, agent.device),
            rollout=RolloutSettings(max_batch=largest, stop=stop),
            probes=[prompt for prompt, _ in prompts.values()][:NUM_PROBES],
            compiles=None,
            max_length=max(len(prompt) + new_tokens for prompt, new_tokens in prompts.values()),
            folder=self.folder.path / ENGINE_FOLDER / target.agent,
            seed=derive_seed(self.settings.seed, "engine", target.label),
        )
        return engine_kind(self.engine).make(spec)

    def _answer(self, pair: EvaluationPair, agent: Agent, engine: Engine) -> None:
        """Answer what is left of a pair; write down every chunk."""
        _report_progress(pair, self.folder, self.watch)
        with closing(make_answerer(agent, engine, pair.spec.task)) as answerer:
            for chunk in self.folder.chunks_left(pair.record.key, pair.plan):
                try:
                    responses, texts = _answer_chunk(answerer, pair, chunk, self.settings.seed)
                finally:
                    for note in (*engine.take_notes(), *answerer.take_notes()):
                        self.watch.on_note(note)
                self.folder.append(pair.record.key, responses, texts)
                _report_progress(pair, self.folder, self.watch)


def free_memory() -> None:
    """Free the memory of models that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_free_memory(settings: AgentSettings, device: torch.device) -> AgentSettings:
    """Return the settings with ``vllm.memory`` set to what is free on the GPU of both agent and engine.

    A share that the user has set stays.
    """
    vllm = settings.vllm
    own = device.index or 0
    here = sum(one.devices is None or own in one.devices for one in vllm.each())  # engines on this GPU
    if device.type != "cuda" or not here or vllm.memory is not None:
        return settings
    free, total = torch.cuda.mem_get_info(device)
    return replace(settings, vllm=replace(vllm, memory=round(USABLE_SHARE * free / total / here, 3)))


def _answer_chunk(
    answerer: Answerer | EpisodeAnswerer, pair: EvaluationPair, chunk: Chunk, seed: int
) -> tuple[list[ScoredResponse], list[str]]:
    """Return the chunk's verified responses and their texts."""
    problems = [pair.spec.problems[position] for position in chunk.positions]
    if not chunk.max_new_tokens:  # the context leaves no room for a response
        unanswered = [
            ScoredResponse(pair.spec.problems[position].id, sample, 0.0, "unparsable", 0, "length")
            for position, sample in chunk.slots
        ]
        return unanswered, [""] * len(unanswered)
    sampling = replace(pair.spec.sampling, max_new_tokens=chunk.max_new_tokens)
    verified = answerer.answer(problems, chunk.samples, sampling, chunk_seed(pair, chunk, seed))
    responses = [
        ScoredResponse(
            answer.rollout.problem.id,
            sample,
            answer.reward,
            answer.verdict.label,
            answer.rollout.num_tokens,
            answer.rollout.finish_reason,
        )
        for answer, (_, sample) in zip(verified, chunk.slots, strict=True)
    ]
    return responses, [answer.rollout.text for answer in verified]


def _report_progress(pair: EvaluationPair, folder: EvaluationFolder, watch: EvaluationObserver) -> None:
    responses = folder.responses(pair.record.key)
    reward = sum(response.reward for response in responses) / len(responses) if responses else None
    watch.on_progress(pair.target.label, pair.spec.name, len(responses), pair.plan.response_count, reward)
