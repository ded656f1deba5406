"""Whatever a user's task returns: verdicts with float rewards, or an error that names the problem."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from hacrl.config.load import build_config
from hacrl.errors import TaskError
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.run import run_locally
from hacrl.tasks.verdicts import checked_verdicts
from hacrl.types import Verdict
from tests.support.sevens import SevensTask
from tests.support.tiny import save_agents
from tests.tasks.helpers import rollout_of

ROLLOUT = rollout_of(SevensTask().train[0], "7")
PROBLEM = f"problem {SevensTask().train[0].prompt!r}"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (None, "gave NoneType verdicts on 1 responses; it must give one each"),
        ([], "gave 0 verdicts on 1 responses; it must give one each"),
        ([1.0], f"gave a response to {PROBLEM} 1.0, which is not a hacrl.types.Verdict"),
        (
            [Verdict(1.0, "right")],  # type: ignore[arg-type]
            f"gave a response to {PROBLEM} the verdict 'right', which is none of correct, wrong, unparsable, "
            "timeout, crash, scored",
        ),
        (
            [Verdict(None, "wrong")],  # type: ignore[arg-type]
            f"gave a response to {PROBLEM} the reward None, which is not a number",
        ),
        (
            [Verdict(float("nan"), "wrong")],
            f"gave a response to {PROBLEM} the reward nan; rewards must be finite",
        ),
        (
            [Verdict(-1e155, "scored")],
            f"gave a response to {PROBLEM} the reward -1e+155; rewards must be between -1e+100 and 1e+100",
        ),
        (
            [Verdict(10**5000, "scored")],
            f"gave a response to {PROBLEM} the reward a number of thousands of digits; rewards must be "
            "finite",
        ),
    ],
)
def test_what_is_no_verdict_is_named_with_its_problem(verdicts: Any, expected: str) -> None:
    with pytest.raises(TaskError) as caught:
        checked_verdicts(SevensTask(), [ROLLOUT], verdicts)
    assert str(caught.value) == f"task 'sevens' {expected}"


@pytest.mark.parametrize("value", [True, 1, np.float32(1), torch.tensor(1.0), Decimal(1)])
def test_rewards_of_any_type_become_floats(value: Any) -> None:
    (verdict,) = checked_verdicts(SevensTask(), [ROLLOUT], [Verdict(value, "correct")])
    assert verdict == Verdict(1.0, "correct")
    assert type(verdict.reward) is float


class LargeRewards(SevensTask):
    """As many sevens as the response has, times a number; judged early or late."""

    def __init__(self, reward: Any, independent_verdicts: bool) -> None:
        super().__init__()
        self.reward, self.independent_verdicts = reward, independent_verdicts

    def verify(self, rollouts):
        return [Verdict(self.reward * rollout.text.count("7"), "scored") for rollout in rollouts]


@pytest.mark.parametrize("early", [False, True])
def test_a_run_with_the_largest_and_with_too_large_rewards(tmp_path, early: bool) -> None:
    def train(output: str, reward: Any) -> list[float]:
        config = build_config(
            {
                "agents": [{"name": name, "model": model} for name, model in models.items()],
                "output": str(tmp_path / output),
                "steps": 2,
                "rollout": {"prompts_per_step": 3, "rollouts_per_prompt": 4, "max_new_tokens": 6},
                "evaluation": {"problems": 2},
            }
        )
        run_locally(config, task=LargeRewards(reward, early))
        return [row["reward"] for row in RolloutLog(tmp_path / output / "rollouts").read()]

    models = save_agents(tmp_path / "models")
    logged = train("run", np.float64(1e99))
    assert max(logged) >= 1e99  # some response has a seven
    with pytest.raises(TaskError, match=r"task 'sevens' gave a response to problem '.*' the reward .*e\+101"):
        train("too-large", 1e101)
