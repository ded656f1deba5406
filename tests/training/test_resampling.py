"""rollout.resample: other prompts replace those without variance; everything else stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hacrl.config.schema import AgentSettings as Agent
from hacrl.config.schema import (
    EvaluationSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
)
from hacrl.errors import CheckpointError
from hacrl.rollouts.groups import PromptGroup
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun
from hacrl.tasks.stream import ProblemStream
from hacrl.training.resampling import Resampler
from hacrl.types import Verdict, VerifiedRollout
from tests.support.rollouts import rollout
from tests.support.sevens import problem
from tests.support.tiny import char_agent
from tests.training.runs import Runs
from tests.training.test_interruptions import Events

ADA = char_agent("ada")
PROMPTS = [problem(f"{number}:") for number in range(10)]


def resampler(prompts: int = 3, rounds: int = 2, method: Any = None, **learning: Any) -> Resampler:
    config = RunConfig(
        agents=(Agent(name="ada", model="m"), Agent(name="bob", model="m")),
        output="unused",
        method=method or HacpoSettings(),
        rollout=RolloutSettings(prompts_per_step=prompts, resample=rounds, max_new_tokens=8),
        learning=LearningSettings(**learning),
        evaluation=EvaluationSettings(problems=0),
    )
    return Resampler(config, ProblemStream(PROMPTS, prompts, seed=0))


def group(number: int, ada: Sequence[float], bob: Sequence[float] = (), text: str = "7") -> PromptGroup:
    """Responses to prompt ``number`` with these rewards, all with the same text."""
    said = rollout(ADA, text)
    answers = {"ada": ada, "bob": bob} if bob else {"ada": ada}
    return PromptGroup(
        PROMPTS[number],
        {
            k: tuple(VerifiedRollout(said, Verdict(r, "scored")) for r in rewards)
            for k, rewards in answers.items()
        },
    )


def chosen(made: Resampler, asked: Sequence[PromptGroup]) -> list[str]:
    return [one.problem.id for one in made.chosen(asked)]


def test_rewards_that_a_learner_compares_decide() -> None:
    """With shared rollouts a learner compares all agents' rewards, else its own alone."""
    apart = group(0, [1, 1], [0, 0])
    assert resampler().has_variance(apart)
    assert not resampler(method=GspoSettings()).has_variance(apart)
    one_agent = group(0, [1, 1], [0, 1])
    assert resampler().has_variance(one_agent)
    assert resampler(method=GspoSettings()).has_variance(one_agent)
    assert not resampler().has_variance(group(0, [1, 1], [1, 1]))


def test_overlong_responses_differ_in_what_is_compared() -> None:
    """8 tokens at most, a buffer of 4: lengths 3 and 7 lose 0 and (7 - 4) / 4."""
    mixed = PromptGroup(
        PROMPTS[0],
        {
            "ada": tuple(
                VerifiedRollout(rollout(ADA, text), Verdict(1.0, "correct")) for text in ("12", "123456")
            )
        },
    )
    assert not resampler().has_variance(mixed)
    assert resampler(overlong_buffer=4).has_variance(mixed)


def test_prompts_with_variance_stay_and_the_first_others_fill_up() -> None:
    flat, varied = [0.0, 0.0], [0.0, 1.0]
    made = resampler(prompts=3)
    asked = [group(0, flat), group(1, varied), group(2, flat), group(3, varied), group(4, flat)]
    assert chosen(made, asked) == ["0:", "1:", "3:"]
    assert chosen(made, [*asked, group(5, varied)]) == ["1:", "3:", "5:"]
    assert chosen(made, asked[:3]) == ["0:", "1:", "2:"]


def test_each_round_asks_as_many_new_prompts_as_are_missing() -> None:
    flat, varied = [0.0, 0.0], [0.0, 1.0]
    made = resampler(prompts=4, rounds=3)
    asked = [group(n, varied if n == 1 else flat) for n in range(4)]
    counts = []
    for number, problems in made.further_rounds(7, asked):
        counts.append((number, len(problems)))
        ids = [PROMPTS.index(one) for one in problems]
        assert not {one.id for one in problems} & {one.problem.id for one in asked}
        asked += [group(n, varied if k == 0 else flat) for k, n in enumerate(ids)]
    # 3 missing, then 2, then 1; 4 + 3 + 2 = 9 of the 10 prompts are known by then
    assert counts == [(1, 3), (2, 2), (3, 1)]


def test_there_are_no_rounds_without_need() -> None:
    varied = [group(n, [0.0, 1.0]) for n in range(3)]
    flat = [group(n, [0.0, 0.0]) for n in range(3)]
    assert list(resampler(rounds=2).further_rounds(1, varied)) == []
    assert list(resampler(rounds=0).further_rounds(1, flat)) == []
    every = [group(n, [0.0, 0.0]) for n in range(10)]  # there is no other prompt left
    assert list(resampler(rounds=2).further_rounds(1, every)) == []


def test_replacements_depend_on_seed_step_and_round_alone() -> None:
    def drawn(seed: int, step: int, number: int) -> list[str]:
        stream = ProblemStream(PROMPTS, 3, seed)
        return [one.id for one in stream.replacements(step, number, 4, {"1:"})]

    assert drawn(0, 5, 1) == drawn(0, 5, 1)
    assert len({tuple(drawn(*key)) for key in [(0, 5, 1), (1, 5, 1), (0, 6, 1), (0, 5, 2)]}) == 4
    assert len(set(drawn(0, 5, 1)) - {"1:"}) == 4


ROLLOUT = {"resample": 2, "rollouts_per_prompt": 2}


def test_a_run_learns_from_replacements_and_counts_every_reward(runs: Runs) -> None:
    run = runs("char", "pair", steps=2, rollout=ROLLOUT)
    log = RolloutLog(run.result.folder / "rollouts")
    rounds = sorted(path.name for path in (log.folder / "step-000001").glob("round-*"))
    assert rounds[0] == "round-1"
    for step, metrics in enumerate(run.steps, start=1):
        rows, learnt = list(log.read(step)), list(log.read_learnt(step))
        asked = {row["problem"] for row in rows}
        trained = {row["problem"] for row in learnt}
        assert len(trained) == 4  # prompts_per_step
        rewards: dict[str, set[float]] = {}
        for row in rows:
            rewards.setdefault(row["problem"], set()).add(row["reward"])
        varied = {name for name, values in rewards.items() if len(values) > 1}
        assert varied <= trained
        for name in ("char", "pair"):
            own = [row["reward"] for row in rows if row["agent"] == name]
            assert len(own) == 2 * len(asked)
            assert metrics[name]["rollout"]["rollouts"] == len(own)
            assert metrics[name]["rollout"]["reward"] == pytest.approx(sum(own) / len(own))
            assert metrics[name]["rollout"]["replaced"] == len(asked) - 4
            assert metrics[name]["learning"]["without_signal"] == pytest.approx(1 - len(varied) / 4)
    assert run.of("char")[0]["rollout"]["replaced"] > 0
    assert run.of("char")[0]["capability"] == pytest.approx(run.of("char")[0]["rollout"]["reward"])


def test_the_first_round_is_that_of_a_run_without_resampling(runs: Runs) -> None:
    """Prompts and responses of the first step's first round are the same, so that methods can be compared."""
    plain = runs("char", "pair", steps=1, rollout={**ROLLOUT, "resample": 0})
    run = runs("char", "pair", steps=1, rollout=ROLLOUT)
    for name in ("char", "pair"):
        files = [one.result.folder / "rollouts" / "step-000001" / f"{name}.jsonl" for one in (plain, run)]
        assert files[0].read_text() == files[1].read_text()


class Interrupting(Events):
    """Interrupts the run at the n-th such event."""

    def __init__(self, at: tuple[str, str], count: int) -> None:
        super().__init__()
        self.wanted, self.left = at, count

    def _interrupt_at(self, event: str, agent: str) -> None:
        if (event, agent) == self.wanted:
            self.left -= 1
            if self.left == 0:
                assert self.run is not None
                self.run.interrupt()


PLACES = [
    (("verify", "pair"), 1),
    (("rollouts", "char"), 2),
    (("rollouts", "pair"), 2),
    (("learn", "char"), 1),
]


def interrupted(runs: Runs, at: tuple[str, str], count: int) -> RunConfig:
    config = runs.config("char", "pair", steps=2, rollout=ROLLOUT)
    events = Interrupting(at, count)
    with LocalRun(config, [events]) as run:
        events.run = run
        run.train()
        assert run.is_interrupted
        run.save()
    assert list((Path(config.output) / "checkpoints").iterdir())  # of the middle of the step
    return config


def finish(config: RunConfig) -> Path:
    found = inspect_run(Path(config.output))
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
        return run.result.folder


def everything(folder: Path) -> dict[str, Any]:
    log = RolloutLog(folder / "rollouts")
    return {
        "metrics": (folder / "metrics.jsonl").read_text(),
        "rollouts": list(log.read()),
        "learnt": [row for step in log.steps() for row in log.read_learnt(step)],
    }


@pytest.mark.parametrize(("at", "count"), PLACES)
def test_a_run_that_was_interrupted_in_any_round_is_resumed_exactly(runs: Runs, at: Any, count: int) -> None:
    whole = runs("char", "pair", steps=2, rollout=ROLLOUT)
    assert whole.of("char")[0]["rollout"]["replaced"] > 0
    folder = finish(interrupted(runs, at, count))
    assert everything(folder) == everything(whole.result.folder)


class Crash(Events):
    """Ends the run like a crash when the first learner begins."""

    def on_phase(self, step: int, phase: str, agent: str) -> None:
        if phase == "learn":
            raise OSError("crash")


def test_a_run_that_was_killed_reads_all_rounds_from_the_log(runs: Runs) -> None:
    """Without a checkpoint of the step nothing but the log knows of its rounds."""
    whole = runs("char", "pair", steps=2, rollout=ROLLOUT)
    config = runs.config("char", "pair", steps=2, rollout=ROLLOUT)
    with pytest.raises(OSError, match="crash"), LocalRun(config, [Crash()]) as run:
        run.train()
    found, events = inspect_run(Path(config.output)), Events()
    with LocalRun(found.config, [events], resumed=found.point) as run:
        run.train()
    assert [phase for phase in events.phases if phase[:2] == (1, "rollout")] == []
    assert everything(Path(config.output)) == everything(whole.result.folder)


def test_a_round_that_learners_need_must_be_in_the_log(runs: Runs) -> None:
    config = interrupted(runs, ("learn", "char"), 1)  # "char" has learnt, "pair" has not
    (Path(config.output) / "rollouts" / "step-000001" / "round-1" / "pair.jsonl").unlink()
    with pytest.raises(CheckpointError, match="rollouts of pair in step 1 are missing"):
        finish(config)


def test_later_rounds_are_asked_anew_if_the_first_one_is(runs: Runs) -> None:
    """Other rewards may call for other prompts, so rollouts of later rounds are not used any more."""
    config = interrupted(runs, ("rollouts", "pair"), 2)
    step = Path(config.output) / "rollouts" / "step-000001"
    assert (step / "round-1" / "pair.jsonl").is_file()
    (step / "char.jsonl").unlink()
    (step / "round-1" / "char.jsonl").write_text("damaged\n")  # would be an error if it were read
    whole = runs("char", "pair", steps=2, rollout=ROLLOUT)
    assert everything(finish(config)) == everything(whole.result.folder)
