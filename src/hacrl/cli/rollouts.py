"""``hacrl rollouts``: print a run's rollout log, grouped by prompt, with the responses of all agents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hacrl.errors import ConfigError
from hacrl.plain_text import printable
from hacrl.rollouts.conversation import conversation, how_it_ended
from hacrl.rollouts.log import RolloutLog, Row
from hacrl.rollouts.records import from_json
from hacrl.types import Episode, Segment

_BOUND = re.compile(r"(>=|<=|>|<|=)?\s*([-+0-9.eE]+)")
_COLOURS = {"correct": "green", "wrong": "red", "scored": "cyan"}


@dataclass(frozen=True)
class RewardFilter:
    """A reward, or a bound on rewards: ``1``, ``<0.5``, ``>=0.9``."""

    relation: str
    value: float

    @classmethod
    def parse(cls, text: str) -> RewardFilter:
        """Parse the text of an option; raise ConfigError if it is neither a number nor a bound."""
        match = _BOUND.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError
            value = float(match[2])
        except ValueError:
            raise ConfigError(f"--reward must be a number or a bound such as '>=0.5', not {text!r}") from None
        if not math.isfinite(value):
            raise ConfigError(f"--reward must be a finite number, not {text!r}")
        return cls(match[1] or "=", value)

    def accepts(self, reward: float) -> bool:
        """Return whether the reward equals the value or is within the bound."""
        return {
            "=": reward == self.value,
            ">": reward > self.value,
            "<": reward < self.value,
            ">=": reward >= self.value,
            "<=": reward <= self.value,
        }[self.relation]


def show_rollouts(
    run: Path,
    step: int | None,
    agent: str | None,
    problem: str | None,
    reward: str | None,
    limit: int,
    console: Console | None = None,
) -> None:
    """Print the prompts of a run with their rollouts: of one step, or of all steps if a problem is named."""
    log = RolloutLog(run / "rollouts")
    rewards = None if reward is None else RewardFilter.parse(reward)
    step = _step(run, log, step, any_step=problem is not None)
    rows = list(log.read(step))
    agents = sorted({row["agent"] for row in rows})
    if agent is not None and agent not in agents:
        raise ConfigError(
            f"--agent {agent!r} has no rollouts in these steps; agents with rollouts: {', '.join(agents)}"
        )
    chosen = [
        row
        for row in rows
        if (agent is None or row["agent"] == agent)
        and (problem is None or problem in (row["problem"], row["prompt"]))
        and (rewards is None or rewards.accepts(row["reward"]))
    ]
    console = console or Console(highlight=False)
    prompts = list(_by_prompt(chosen))
    for group in prompts[:limit]:
        _print_prompt(console, group)
    where = f"step {step}" if step is not None else f"steps {log.steps()[0]} to {log.steps()[-1]}"
    hidden = f" ({len(prompts) - limit} more with a larger --limit)" if len(prompts) > limit else ""
    console.print(f"{where}: {len(chosen)} of {len(rows)} rollouts match, {len(prompts)} prompts{hidden}")


def _step(run: Path, log: RolloutLog, step: int | None, any_step: bool) -> int | None:
    """Return the step to show; None stands for all steps."""
    steps = log.steps()
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder: name the folder of a run, e.g. runs/size")
    if not steps:
        raise ConfigError(
            f"{run} holds no rollouts: no step is done yet, or the recipe has keep_rollouts: none"
        )
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step} is not in the log, which holds steps {steps[0]} to {steps[-1]}")
    if step is None and not any_step:
        return steps[-1]
    return step


def _by_prompt(rows: Sequence[Row]) -> Iterator[list[Row]]:
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["problem"]), []).append(row)
    yield from groups.values()


def _print_prompt(console: Console, rows: Sequence[Row]) -> None:
    first = rows[0]
    console.rule(Text(f"step {first['step']} · problem {printable(first['problem'])[:60]}"))
    console.print(Text(printable(first["prompt"], multiline=True)))
    if first["answer"]:
        console.print(Text(f"gold answer: {printable(first['answer'])}", style="bold"))
    for row in rows:
        head = (
            f"{row['agent']} #{row['sample']}: reward {row['reward']:g}, {row['verdict']}, "
            f"{row['tokens']} tokens{_ending(row)}"
        )
        console.print(Text(head, style=_COLOURS.get(row["verdict"], "yellow")))
        console.print(Text(printable(_response(row), multiline=True)))


def _ending(row: Row) -> str:
    if "episode" in row:
        turns = sum(segment["kind"] == "action" for segment in row["segments"])
        ending = printable(how_it_ended(from_json(Episode, row["episode"])))
        return f", {turns} {'turn' if turns == 1 else 'turns'}, {ending}"
    return ", cut at max_new_tokens" if row["finish_reason"] == "length" else ""


def _response(row: Row) -> str:
    """Return a response's text; an episode as a conversation."""
    if "episode" not in row:
        return str(row["text"])
    opening = row["episode"]["opening"]
    told = conversation([from_json(Segment, segment) for segment in row["segments"]])
    return f"[user: the environment's opening]\n{opening}\n{told}" if opening else told
