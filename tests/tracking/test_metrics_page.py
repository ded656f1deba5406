"""docs/metrics.md has every number that real runs write, and no row that none writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hacrl.config.schema import AlignedSettings, GrpoSettings, GspoSettings, LoraSettings, NaiveSettings
from hacrl.engines.base import SyncReport
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.runs.run import run_locally
from hacrl.tracking.scalars import evaluation_scalars, step_scalars
from hacrl.training.metrics import StepReport
from hacrl.training.observer import Observer
from hacrl.types import Verdict
from tests.support.episode_runs import episode_config
from tests.support.sevens import SevensTask
from tests.training.asynchronous.orders import Order, asynchronous, delayed, finish
from tests.training.runs import HACPO, Runs, runs

__all__ = ["runs"]
PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
AGENTS = ("char", "twin", "pair", "whole", "parts")
SMALL = {"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 4}


class Recorder(Observer):
    """Collects the names that trackers get."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_step(self, report: StepReport, seconds) -> None:
        self.names |= step_scalars(report, seconds).keys()

    def on_evaluation(self, step: int, accuracies) -> None:
        self.names |= evaluation_scalars(accuracies).keys()


class Scored(SevensTask):
    """A task with the values of a reward function and a logged number."""

    def judge(self, response: str) -> Verdict:
        value = float("7" in response)
        label = "correct" if value else "wrong"
        return Verdict(value, label, {"brief": value}, metrics={"words": 2.0})


def pattern(name: str) -> str:
    """Return a tracker's name with the page's placeholders."""
    either = "|".join(AGENTS)
    name = re.sub(rf"^(?:{either})/", "AGENT/", name)
    name = re.sub(rf"/from/(?:{either})/", "/from/SOURCE/", name)
    name = re.sub(rf"^seconds/\w+/(?:{either})$", "seconds/PHASE/AGENT", name)
    for group, placeholder in (
        ("verdicts", "LABEL"),
        ("logged", "NAME"),
        ("dropped", "REASON"),
        ("ends", "END"),
    ):
        name = re.sub(rf"/{group}/\w+$", f"/{group}/{placeholder}", name)
    return re.sub(r"/rewards/\w+/", "/rewards/FUNCTION/", name)


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every number in a line."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers(part, (*path, key))
    elif isinstance(value, int | float):
        yield path


def tracker_name(path: tuple[str, ...]) -> str:
    """Return the name that the page's first table gives a number of metrics.jsonl."""
    _, agent, *rest = path
    match rest:
        case ["rollout", *keys]:
            return "/".join([agent, *keys])
        case ["learning", "sources", source, key]:
            return f"{agent}/from/{source}/{key}"
        case ["learning", ("retokenised" | "dropped") as group, source, key]:
            return f"{agent}/from/{source}/{group}/{key}"
        case ["learning", "left_out" | "alignment" | "trusted" as key, source]:
            return f"{agent}/from/{source}/{key}"
        case ["capability_ratios", source]:
            return f"{agent}/from/{source}/capability_ratio"
        case ["asynchronous", "staleness", source, key]:
            return f"{agent}/from/{source}/staleness/{key}"
        case ["asynchronous", ("missing" | "late" | "too_late") as group, source]:
            return f"{agent}/from/{source}/{group}"
    return "/".join([agent, *rest])


def asynchronous_run(runs: Runs, recorder: Recorder) -> Path:
    """Make a run in which "pair" answers batch 2 too late for a step, and batch 4 too late for all."""
    config = asynchronous(runs, "char", "pair", staleness=2, patience=5.0, steps=7)
    until = {2: ("learn", "char", 2), 4: ("learn", "char", 7)}
    order = Order(
        delayed(lambda job: job.agent == "pair" and job.step in until and until[job.step] not in order.ran)
    )
    finish(config, order, [recorder])
    return Path(config.output)


def test_the_page_has_exactly_what_runs_write(runs: Runs, tmp_path: Path, monkeypatch) -> None:
    def sync(self, proven=True):
        return SyncReport(self.policy.policy_version, "none", 0.0, 0)

    monkeypatch.setattr(TransformersEngine, "sync", sync)
    lora = runs.agent("twin", lora=LoraSettings(rank=2))
    configs = [
        runs.config("char", "pair", method=replace(HACPO, kl_coefficient=0.1), evaluation={"problems": 2}),
        runs.config("char", lora, "pair", method=NaiveSettings(), learning={"max_cross_rollouts": 2}),
        runs.config("char", method=GspoSettings(), learning={"old_policy": "learner"}),
        runs.config("pair", method=GrpoSettings(), learning={"mask_truncated": True}),
        runs.config("char", "twin", method=AlignedSettings()),
    ]
    recorder = Recorder()
    written = set()
    folders = [asynchronous_run(runs, recorder)]
    for config in configs:
        config = replace(config, steps=2, rollout=replace(config.rollout, **SMALL))
        folders.append(run_locally(config, [recorder], task=Scored()).folder)
    folders.append(run_locally(episode_config(tmp_path / "other", "episodes", 1), [recorder]).folder)
    for folder in folders:
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            report = json.loads(line)
            assert report.keys() == {"step", "agents"}
            written |= {pattern(tracker_name(path)) for path in numbers({"agents": report["agents"]})}
    tracked = {pattern(name) for name in recorder.names}
    elsewhere = {"AGENT/accuracy", "AGENT/accuracy_stderr", "seconds/PHASE/AGENT", "seconds/whole"}
    assert written == tracked - elsewhere
    rows = re.findall(r"^\| `([A-Za-z_/]+)` \| [^|]* \| ", PAGE.partition("## Responses")[2], re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == tracked
