"""Health notes on episodes, from reports of steps by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hacrl.config.schema import RunConfig
from hacrl.training.episode_metrics import EpisodesReport
from hacrl.training.health.monitor import HealthMonitor
from hacrl.training.learn_stats import LearnStats
from hacrl.training.metrics import AgentReport, StepReport, learn_report, rollout_report
from hacrl.training.samples import LearnerSamples
from tests.support.episode_runs import episode_config
from tests.support.rollouts import judged, rollout
from tests.support.tiny import char_agent

AGENT = char_agent("whole")
USUAL = EpisodesReport(2.0, 1.0, 5.0, 0, 0, 0, 0, {"done": 20}, {})  # of 20 episodes


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return episode_config(tmp_path_factory.mktemp("notes"), "run")


def step_of(number: int, **episodes: EpisodesReport) -> StepReport:
    """A healthy step but for its episodes."""
    verified = [judged(rollout(AGENT, text), i % 2) for i, text in enumerate(["7", "1"] * 10)]
    learning = replace(learn_report("whole", LearnStats(), LearnerSamples()), without_signal=0.0)
    return StepReport(
        number,
        {
            name: AgentReport(0.5, 0, replace(rollout_report(verified), episodes=report), learning)
            for name, report in episodes.items()
        },
    )


def notes_of(config: RunConfig, steps: int, **episodes: EpisodesReport) -> list[str]:
    """The notes on episodes after so many equal steps."""
    monitor = HealthMonitor(config)
    found = [note for number in range(steps) for note in monitor.update(step_of(number + 1, **episodes))]
    return [note for note in found if "learns nothing" not in note]


def test_healthy_episodes_have_no_note(config: RunConfig) -> None:
    assert notes_of(config, 4, whole=USUAL, parts=USUAL) == []


def test_failing_environments(config: RunConfig) -> None:
    ends = {"done": 18, "failed": 2}
    reasons = {"did not answer within 5 s": 1, "raised ValueError: x": 1}
    failing = replace(USUAL, failed=2, timeouts=1, ends=ends, failures=reasons)
    (note,) = notes_of(config, 1, whole=failing, parts=USUAL)
    assert note.startswith(
        "the environments of 2 of 20 episodes of whole failed; most often, the environment did not answer "
        "within 5 s. "
    )
    assert "Correct the environment" in note
    (slow,) = notes_of(config, 1, whole=replace(failing, timeouts=2))
    assert "task.options.limits.call_seconds" in slow
    (once,) = notes_of(config, 1, whole=replace(failing, failed=1))  # 1 of 20 is a twentieth
    assert "1 of 20" in once


def test_episodes_cut_by_limits(config: RunConfig) -> None:
    for end, setting in (("max_turns", "task.options.max_turns"), ("max_tokens", "rollout.max_new_tokens")):
        cut = replace(USUAL, ends={"done": 13, end: 7})  # 35 %
        assert notes_of(config, 1, whole=cut) == []
        (note,) = notes_of(config, 2, whole=cut)
        assert f"35% of the episodes of whole were ended by {setting}" in note
    assert notes_of(config, 4, whole=replace(USUAL, ends={"done": 14, "max_turns": 6})) == []


def test_tool_calls_that_cannot_be_read(config: RunConfig) -> None:
    (note,) = notes_of(config, 2, whole=replace(USUAL, unread_calls=8))  # of 20 * 2 turns
    assert "8 of 40 turns of whole hold a tool call that cannot be read" in note
    assert notes_of(config, 2, whole=replace(USUAL, unread_calls=7)) == []


def test_an_agent_that_never_calls_a_tool(config: RunConfig) -> None:
    silent = replace(USUAL, tool_calls=0.0)
    (note,) = notes_of(config, 3, whole=silent, parts=USUAL)
    assert "agent whole called no tool in 20 episodes, while others did" in note
    assert notes_of(config, 3, whole=silent, parts=silent) == []  # a text game has no tools
