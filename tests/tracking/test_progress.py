"""The progress of a run: a live table in a terminal, a line per step elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hacrl.tracking.progress import RunProgress
from hacrl.training.metrics import Accuracy, StepReport
from tests.tracking.scenario import AGENTS, SECONDS, report, rollouts


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A progress display of two agents, its printed text, and its current live table."""

    def __init__(self, terminal: bool, steps: int = 2, first_step: int = 0, width: int = 80) -> None:
        self.clock = Clock()
        self.text = io.StringIO()
        self.console = Console(file=self.text, width=width, force_terminal=terminal, color_system=None)
        self.progress = RunProgress("GSPO", AGENTS, steps, self.console, first_step, self.clock)

    def table(self) -> list[str]:
        with self.console.capture() as captured:
            self.console.print(self.progress._render())
        return [line.rstrip() for line in captured.get().splitlines()]

    def step(self, number: int, seconds: float, of: StepReport | None = None) -> None:
        """One step that takes so many seconds."""
        self.progress.on_phase(number, "rollout", "qwen")
        self.clock.now += seconds
        self.progress.on_step(replace(of or report(1), step=number), SECONDS)


def with_gaps(*gaps: float | None) -> StepReport:
    """The first step of the scenario; rewards are 16.75 and 20.75, it took 0.75 s."""
    step = report(1)
    agents = {
        name: replace(agent, learning=replace(agent.learning, sampler_gap=gap))
        for (name, agent), gap in zip(step.agents.items(), gaps, strict=True)
    }
    return replace(step, agents=agents)


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ((0.0031, 0.012), "  sampler gap qwen 3.1e-03  llama 1.2e-02"),
        ((2e-6, 0.012), "  sampler gap llama 1.2e-02"),
        ((2e-6, 1e-6), ""),
        ((None, None), ""),
    ],
)
def test_a_sampler_gap_is_shown_if_it_is_larger_than_rounding(gaps, words: str) -> None:
    shown = Shown(terminal=False)
    shown.progress.on_step(with_gaps(*gaps), SECONDS)
    line = shown.text.getvalue()
    assert line == f"GSPO: step 1/2  reward qwen 16.750  llama 20.750{words}  (0.8 s, about 0:01 left)\n"


def test_in_a_terminal_the_sampler_gap_is_a_column() -> None:
    shown = Shown(terminal=True, width=160)
    shown.progress.on_step(with_gaps(0.0031, 2e-6), SECONDS)
    _, header, qwen, llama = shown.table()
    assert header.endswith("sampler gap")
    assert qwen.split()[-1] == "3.1e-03"
    assert llama.split()[-1] == "20.750"
    shown.progress.on_step(with_gaps(2e-6, None), SECONDS)
    assert "sampler gap" not in shown.table()[1]


def test_a_line_per_step_shows_speed_and_remaining_time_of_a_resumed_run() -> None:
    """qwen: 6 rollouts of 3 tokens in 0.5 s are 36 a second; of llama no rollout was timed.

    Steps 41, 42 and 43 of 50 take 10, 30 and 20 s: their median is 10, 20, 20 s, 9, 8 and 7 are left.
    """
    shown = Shown(terminal=False, steps=50, first_step=40)
    for number, seconds in ((41, 10.0), (42, 30.0), (43, 20.0)):
        for agent in AGENTS:
            shown.progress.on_rollouts(number, agent, rollouts(agent))
        shown.step(number, seconds, with_gaps(None, None))
    told = "reward qwen 16.750  llama 20.750  tokens/s qwen 36  (0.8 s, about"
    assert shown.text.getvalue().splitlines() == [
        f"GSPO: step 41/50  {told} 1:30 left)",
        f"GSPO: step 42/50  {told} 2:40 left)",
        f"GSPO: step 43/50  {told} 2:20 left)",
    ]


def test_the_last_step_has_nothing_left_and_speeds_are_of_their_own_step() -> None:
    shown = Shown(terminal=False, steps=2)
    shown.progress.on_rollouts(1, "qwen", rollouts("qwen"))
    shown.step(1, 4.0, with_gaps(None, None))
    shown.step(2, 4.0, with_gaps(None, None))  # an earlier process made the rollouts of this step
    assert shown.text.getvalue().splitlines() == [
        "GSPO: step 1/2  reward qwen 16.750  llama 20.750  tokens/s qwen 36  (0.8 s, about 0:04 left)",
        "GSPO: step 2/2  reward qwen 16.750  llama 20.750  (0.8 s)",
    ]


def test_one_long_step_among_ten_does_not_change_the_estimate() -> None:
    """19 steps of 10 s and one evaluation of an hour in between: 80 left are 800 s, not hours."""
    shown = Shown(terminal=False, steps=100)
    for number in range(1, 21):
        shown.step(number, 10.0)
        if number == 15:
            shown.progress.on_phase(15, "evaluate", "qwen")
            shown.clock.now += 3600
    assert "step 20/100" in shown.text.getvalue()
    assert shown.text.getvalue().endswith("about 13:20 left)\n")


def test_the_live_table_of_a_resumed_run_in_80_columns() -> None:
    shown = Shown(terminal=True, steps=50, first_step=40)
    assert shown.table()[0].endswith(" 40/50 steps · 0:00 elapsed")
    shown.progress.on_evaluation(40, {"qwen": Accuracy(0.25, 0.1, 4, 1)})
    shown.progress.on_rollouts(41, "qwen", rollouts("qwen") * 100)  # 1,800 tokens in 0.5 s
    low = with_gaps(None, None)
    low = replace(
        low,
        agents={
            name: replace(a, rollout=replace(a.rollout, reward=reward))
            for (name, a), reward in zip(low.agents.items(), (0.0, 1.0), strict=True)
        },
    )
    shown.step(41, 100.0, low)
    shown.progress.on_phase(42, "rollout", "llama")
    for _ in range(12):
        shown.progress.on_response("llama")
    shown.clock.now += 37
    header, headings, qwen, llama = shown.table()
    # 9 steps of 100 s are left, less 37 s
    assert header.startswith("GSPO ━")
    assert header.endswith(" 41/50 steps · 2:17 elapsed · about 14:23 left")
    assert headings.split() == ["agent", "phase", "reward", "per", "step", "accuracy", "tokens/s"]
    assert qwen.split() == ["qwen", "▁", "0.000", "0.250", "3,600"]
    assert llama.split() == ["llama", "generating", "12", "·", "0:37", "█", "1.000"]
    assert max(map(len, shown.table())) <= 80
    shown.progress.on_phase(42, "verify", "llama")
    assert "verifying · 0:00" in shown.table()[3]
    shown.clock.now += 500  # longer than expected: the other steps count in full
    assert shown.table()[0].endswith("about 13:20 left")


def test_agents_that_generate_concurrently_are_both_shown() -> None:
    shown = Shown(terminal=True)
    for agent in ("qwen", "llama"):
        shown.progress.on_phase(1, "sync", agent)
    shown.progress.on_phase(1, "rollout", "qwen")
    shown.progress.on_response("qwen")
    shown.clock.now += 3
    *_, qwen, llama = shown.table()
    assert qwen.split() == ["qwen", "generating", "1", "·", "0:03"]
    assert llama.split() == ["llama", "syncing", "weights", "·", "0:03"]
    shown.progress.on_phase(1, "rollout", "llama")
    for agent in ("llama", "qwen"):
        shown.progress.on_response(agent)
    shown.clock.now += 2
    *_, qwen, llama = shown.table()
    assert qwen.split() == ["qwen", "generating", "2", "·", "0:05"]
    assert llama.split() == ["llama", "generating", "1", "·", "0:02"]
    shown.progress.on_phase(1, "verify", "qwen")
    *_, qwen, llama = shown.table()
    assert (qwen.split(), llama.split()) == (["qwen", "verifying", "·", "0:00"], ["llama"])


def test_agents_that_are_evaluated_concurrently_or_in_turns() -> None:
    shown = Shown(terminal=True)
    for phase in ("sync", "evaluate"):
        for agent in ("qwen", "llama"):
            shown.progress.on_phase(0, phase, agent)
    for agent in ("qwen", "llama", "qwen"):
        shown.progress.on_response(agent)
    *_, qwen, llama = shown.table()
    assert qwen.split() == ["qwen", "evaluating", "2", "·", "0:00"]
    assert llama.split() == ["llama", "evaluating", "1", "·", "0:00"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_longer_than_the_terminal_and_every_agent_keeps_its_name(width: int) -> None:
    shown = Shown(terminal=True, steps=100_000, width=width)
    for number in range(1, 40):
        shown.progress.on_rollouts(number, "qwen", rollouts("qwen") * 1000)
        shown.step(number, 5000.0, with_gaps(0.003, 0.004))
    shown.progress.on_phase(40, "sync", "qwen")
    shown.clock.now += 83
    lines = shown.table()
    assert max(map(len, lines)) <= width
    table = "\n".join(lines)
    for words in ("qwen", "llama", "syncing", "1:23", "36,000", "3.0e-03", "39/100000", "days"):
        assert words in table


def test_an_agent_that_skips_a_step_is_shown_as_paused() -> None:
    step = with_gaps(None, None)
    alone = replace(step, agents={"qwen": step.agents["qwen"]})
    shown = Shown(terminal=True)
    shown.step(1, 1.0, alone)
    shown.progress.on_phase(2, "rollout", "qwen")
    assert shown.table()[3].split() == ["llama", "paused"]
    plain = Shown(terminal=False)
    plain.step(1, 1.0, alone)
    assert plain.text.getvalue() == "GSPO: step 1/2  reward qwen 16.750  (0.8 s, about 0:01 left)\n"
