"""What a run says of a sampler whose numbers are not the learner's, while it goes on."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hacrl.learning.reports import StepReport
from hacrl.report.progress import RunProgress
from tests.tracking.scenario import AGENTS, SECONDS, report


def with_gaps(*gaps: float | None) -> StepReport:
    """The first step of the scenario; rewards are 16.75 and 20.75, it took 0.75 s."""
    step = report(1)
    agents = {
        name: replace(agent, learning=replace(agent.learning, sampler_gap=gap))
        for (name, agent), gap in zip(step.agents.items(), gaps, strict=True)
    }
    return replace(step, agents=agents)


def said(step: StepReport, terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, width=160, force_terminal=terminal, color_system=None)
    with RunProgress("GSPO", AGENTS, 2, console) as progress:
        progress.on_step(step, SECONDS)
    return text.getvalue()


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ((0.0031, 0.012), "  sampler gap qwen 3.1e-03  llama 1.2e-02"),
        ((2e-6, 0.012), "  sampler gap llama 1.2e-02"),
        ((2e-6, 1e-6), ""),
        ((None, None), ""),
    ],
)
def test_a_gap_is_said_where_it_is_more_than_rounding(gaps, words: str) -> None:
    line = said(with_gaps(*gaps), terminal=False)
    assert line == f"GSPO: step 1/2  reward qwen 16.750  llama 20.750{words}  (0.8 s)\n"


def test_on_a_terminal_it_is_a_column_of_the_table() -> None:
    table = said(with_gaps(0.0031, 2e-6), terminal=True)
    header, qwen, llama = (
        next(line for line in reversed(table.splitlines()) if line.strip().startswith(word))
        for word in ("agent", "qwen", "llama")
    )
    assert header.split()[-2:] == ["sampler", "gap"]
    assert qwen.split()[-1] == "3.1e-03"
    assert llama.split()[-1] == "20.750"
    assert "sampler gap" not in said(with_gaps(2e-6, None), terminal=True)
