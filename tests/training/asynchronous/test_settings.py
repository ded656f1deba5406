"""Which runs can be asynchronous. What cannot is refused before models load, with the key and the fix."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hacrl import HACRLConfig
from hacrl.config.load import build_config
from hacrl.config.schema import AsynchronousSettings
from hacrl.engines.registry import check_beside_learning
from hacrl.errors import ConfigError
from hacrl.executors.workers import _check_all_fit
from hacrl.models.agent import Agent
from hacrl.runs.run import LocalRun
from hacrl.runs.watchdog import Watchdog
from hacrl.tracking.progress import RunProgress
from hacrl.tracking.scalars import step_scalars
from hacrl.training.asynchronous.staleness import Staleness
from hacrl.training.metrics import AsynchronousReport, StepReport
from tests.training.asynchronous.orders import Order, asynchronous, oldest_first, open_run
from tests.training.runs import Runs


def config(*, copies: int = 1, **sections: Any):
    return build_config(
        {
            "output": "unused",
            "agents": [{"name": "ada", "model": "bundled:qwen-direct"}, {"name": "bob", "model": "x/y"}],
            "agent_defaults": {"replicas": {"count": copies}},
            "asynchronous": {"max_staleness": 1},
            **sections,
        },
        "recipe",
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"asynchronous": {"max_staleness": -1}}, "max_staleness must not be negative"),
        ({"asynchronous": {"max_staleness": 1, "patience": -2.0}}, "patience must not be negative"),
        ({"asynchronous": {"patience": 5.0}}, r"patience=5.0 needs max_staleness of at least 1"),
        ({"learning": {"offload": "weights"}}, r"set learning.offload=never, and give agents devices"),
    ],
)
def test_settings_that_cannot_be(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**sections)


def test_an_engine_that_shares_the_learners_weights_is_refused(runs: Runs, monkeypatch) -> None:
    monkeypatch.setattr(Agent, "load", lambda *_: pytest.fail("a model was loaded"))
    settings = runs.config("char", "pair")
    settings = replace(settings, asynchronous=AsynchronousSettings(max_staleness=1))
    message = (
        r"asynchronous.max_staleness=1: agent 'char' samples with the weights that it learns, so it cannot "
        r"sample while it learns. Set agents.char.replicas.count=1 with engine transformers, or "
    )
    with pytest.raises(ConfigError, match=message):
        LocalRun(settings)
    assert not Path(settings.output).exists()
    check_beside_learning(config(rollout={"engine": "vllm"}, copies=0))
    check_beside_learning(config())


def test_agents_that_do_not_fit_side_by_side_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent 'ada' does not fit .*agents.ada.device and agents.ada.rep"):
        _check_all_fit(config(), {"bob": "never", "ada": "stream"})
    _check_all_fit(config(), {"ada": "never"})
    _check_all_fit(config(asynchronous={}), {"ada": "stream"})


def test_python_has_the_section() -> None:
    settings = HACRLConfig(
        output="unused",
        agent_defaults={"replicas": {"count": 1}},
        asynchronous=AsynchronousSettings(max_staleness=2, patience=3.0),
    )
    agents = [{"name": "ada", "model": "x/y"}]
    made = settings.run_config(agents, {"name": "arithmetic"}, None)
    assert made.asynchronous == AsynchronousSettings(max_staleness=2, patience=3.0)


def test_trackers_get_the_staleness(runs: Runs) -> None:
    settings = asynchronous(runs, "char", "pair", steps=1)
    with open_run(settings, Order(oldest_first)) as run:
        reports: list[StepReport] = []
        run.observer.add(Keep(reports))
        run.train()
    (report,) = reports
    found = AsynchronousReport(
        {"pair": Staleness(0.5, 1, 2.0, 4)}, 0.25, {"pair": 16}, {"pair": 3}, {"pair": 2}
    )
    char = replace(report.agents["char"], asynchronous=found)
    scalars = step_scalars(replace(report, agents={"char": char}), {})
    assert {
        name: value
        for name, value in scalars.items()
        if "/from/pair/" in name and ("stal" in name or "late" in name)
    } == {
        "char/from/pair/staleness/steps_mean": 0.5,
        "char/from/pair/staleness/steps_max": 1.0,
        "char/from/pair/staleness/versions_mean": 2.0,
        "char/from/pair/staleness/versions_max": 4.0,
        "char/from/pair/late": 3.0,
        "char/from/pair/too_late": 2.0,
    }
    assert scalars["char/asynchronous/mixed"] == 0.25
    assert scalars["char/from/pair/missing"] == 16.0


class Keep(RunProgress):
    """Keeps reports; shows nothing."""

    def __init__(self, reports: list[StepReport]) -> None:
        super().__init__("a run", ["char", "pair"], 1, Console(file=StringIO()), overlaps=True)
        self._reports = reports

    def on_step(self, report: StepReport, seconds: Any) -> None:
        super().on_step(report, seconds)
        self._reports.append(report)


def test_every_agent_is_shown_with_the_phase_that_it_began_last(tmp_path: Path) -> None:
    for overlaps, shown in ((True, {"ada": "learn", "bob": "rollout"}), (False, {"bob": "rollout"})):
        progress = RunProgress("a run", ["ada", "bob"], 9, Console(file=StringIO()), overlaps=overlaps)
        progress.on_phase(1, "learn", "ada")
        progress.on_phase(2, "rollout", "bob")
        progress.on_response("bob")
        assert {name: activity.phase for name, activity in progress._activities.items()} == shown
        assert progress._activities["bob"].responses == 1
    said: list[str] = []
    watchdog = Watchdog(1, tmp_path, said.append, overlaps=True, clock=lambda: 0.0)
    watchdog.on_phase(1, "learn", "ada")
    watchdog.on_phase(1, "rollout", "bob")
    watchdog.on_end()
    assert watchdog._activity.phases == {"ada": "learn", "bob": "rollout"}
