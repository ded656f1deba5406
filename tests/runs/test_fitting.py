"""Problems whose prompts do not fit an agent: the message names settings that work, or they are left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hacrl.config.load import apply_override, build_config, config_to_yaml, parse_yaml
from hacrl.config.schema import RunConfig
from hacrl.errors import TaskError
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.preflight import preflight
from hacrl.runs.run import run_locally
from tests.runs.long_prompts import LongTask, config_of, edit, refusal, with_rollout
from tests.support.sevens import problem
from tests.support.tiny import save_agents


def with_proposals(config: RunConfig, message: str) -> list[RunConfig]:
    """Return the config with each change that the message proposes."""
    _, _, fixes = message.rpartition("the model's context length is ")
    changed = []
    for fix in fixes.split("; or "):
        data = parse_yaml(config_to_yaml(config), "config")
        for change in re.findall(r"[a-z_.]+=\d+", fix):
            apply_override(data, change)
        changed.append(build_config(data))
    return changed


def test_the_message_counts_the_problems_and_names_the_longest(
    models: dict[str, str], tmp_path: Path
) -> None:
    # A context of 64 has room for 5 tokens of prompt beside 59 new ones. Of training prompts of 3 to 10
    # tokens five are longer, and both held-out ones, of 11 and 12. After each of them 64 - 12 = 52 fit.
    config = with_rollout(config_of(models, tmp_path), max_new_tokens=59)
    assert refusal(config, LongTask(), TaskError) == (
        "5 of 8 training problems and 2 of 2 held-out problems do not fit the agents' contexts. The longest "
        "is held-out problem '+++++++++++:' with 12 tokens for agent 'char': with rollout.max_new_tokens=59 "
        "it needs 71, but the model's context length is 64: set rollout.max_new_tokens=52 to keep all "
        "problems"
    )


def test_the_limit_itself_fits(models: dict[str, str], tmp_path: Path) -> None:
    # the longest prompts are 10 in training, 12 held out: 12 + 52 = 64
    config = with_rollout(config_of(models, tmp_path), max_new_tokens=52)
    assert len(preflight(config, LongTask()).train) == 8
    message = refusal(with_rollout(config, max_new_tokens=53), LongTask(), TaskError)
    assert message.startswith("1 of 2 held-out problems do not fit")
    assert message.endswith(
        "set rollout.max_new_tokens=52 to keep all problems; or set rollout.max_prompt_tokens=11 to keep 8 "
        "of 8 training and 1 of 2 held-out problems"
    )


def test_held_out_problems_have_their_own_new_tokens(models: dict[str, str], tmp_path: Path) -> None:
    evaluation = {"problems": 2, "samples_per_problem": 1, "max_new_tokens": 60}
    message = refusal(config_of(models, tmp_path, evaluation=evaluation), LongTask(), TaskError)
    assert "with evaluation.max_new_tokens=60 it needs 72, but the model's context length is 64: " in message
    assert message.endswith("set evaluation.max_new_tokens=52 to keep all problems")  # 64 - 12


def test_both_limits_are_named_if_both_are_too_large(models: dict[str, str], tmp_path: Path) -> None:
    evaluation = {"problems": 2, "samples_per_problem": 1, "max_new_tokens": 60}
    config = with_rollout(config_of(models, tmp_path, evaluation=evaluation), max_new_tokens=55)
    message = refusal(config, LongTask(), TaskError)
    # training: only the prompt of 10 tokens is too long beside 55
    assert message.startswith("1 of 8 training problems and 2 of 2 held-out problems do not fit")
    assert "set rollout.max_new_tokens=54 and evaluation.max_new_tokens=52 to keep all problems" in message


def test_the_agent_with_the_smaller_context_is_the_one_named(models: dict[str, str], tmp_path: Path) -> None:
    edit(Path(models["pair"]) / "config.json", lambda config: config.update(max_position_embeddings=10))
    message = refusal(config_of(models, tmp_path), LongTask(), TaskError)
    # 10 - 4 = 6: of 3 to 10 tokens, four are longer. After 12 tokens no response fits, however short.
    assert message == (
        "4 of 8 training problems and 2 of 2 held-out problems do not fit the agents' contexts. The longest "
        "is held-out problem '+++++++++++:' with 12 tokens for agent 'pair': with rollout.max_new_tokens=4 "
        "it needs 16, but the model's context length is 10: set rollout.max_prompt_tokens=6 to keep 4 of 8 "
        "training and 0 of 2 held-out problems"
    )


def test_no_setting_is_named_that_does_not_help(models: dict[str, str], tmp_path: Path) -> None:
    for folder in models.values():
        edit(Path(folder) / "config.json", lambda config: config.update(max_position_embeddings=7))
    message = refusal(config_of(models, tmp_path), LongTask(), TaskError)
    # 7 - 4 = 3 tokens leave one training problem, fewer than the 2 prompts of a step
    assert message.endswith("no setting helps: use shorter prompts, or models with a longer context")


@pytest.mark.parametrize(
    ("contexts", "rollout", "evaluation"),
    [
        ({"char": 64, "pair": 64}, 53, None),
        ({"char": 64, "pair": 64}, 62, None),  # limiting prompts to 64 - 62 = 2 tokens would leave none
        ({"char": 64, "pair": 64}, 55, 60),
        ({"char": 20, "pair": 64}, 12, None),
        ({"char": 20, "pair": 16}, 9, 8),
        ({"char": 12, "pair": 11}, 4, None),
    ],
)
def test_every_proposed_setting_works(
    models: dict[str, str], tmp_path: Path, contexts: dict[str, int], rollout: int, evaluation: int | None
) -> None:
    for name, length in contexts.items():
        edit(
            Path(models[name]) / "config.json",
            lambda config, length=length: config.update(max_position_embeddings=length),
        )
    held_out = {"problems": 2, "samples_per_problem": 1}
    config = config_of(models, tmp_path, evaluation=held_out | {"max_new_tokens": evaluation or rollout})
    config = with_rollout(config, max_new_tokens=rollout)
    message = refusal(config, LongTask(), TaskError)
    proposals = with_proposals(config, message)
    assert proposals
    for proposal, text in zip(proposals, message.split("; or "), strict=True):
        checked = preflight(proposal, LongTask())
        counts = re.search(r"keep (\d+) of 8 training and (\d+) of 2", text)
        expected = [8, 2] if counts is None else [int(count) for count in counts.groups()]
        assert [len(checked.train), len(checked.test)] == expected


def test_long_prompts_can_be_left_out_for_all_agents(models: dict[str, str], tmp_path: Path) -> None:
    config = with_rollout(config_of(models, tmp_path), max_prompt_tokens=6)
    checked = preflight(config, LongTask())
    # of 3 to 10 tokens, four have more than 6; both held-out ones have
    assert [len(one.prompt) for one in checked.train] == [3, 4, 5, 6]
    assert checked.test == []
    assert checked.notes == (
        "4 training problems are left out: their prompts are longer than "
        "rollout.max_prompt_tokens=6 for at least one agent",
        "2 held-out problems are left out: their prompts are longer than "
        "rollout.max_prompt_tokens=6 for at least one agent",
    )


def test_the_longest_encoding_of_any_agent_counts(models: dict[str, str], tmp_path: Path) -> None:
    """1111: is 5 tokens in characters and 3 in pairs: too long for one agent, so no agent gets it."""
    task = LongTask()
    task.train = [problem("1111:"), problem("11:"), problem("+:")]
    config = with_rollout(config_of(models, tmp_path, evaluation={"problems": 0}), max_prompt_tokens=4)
    assert [one.prompt for one in preflight(config, task).train] == ["11:", "+:"]
    alone = with_rollout(
        config_of({"pair": models["pair"]}, tmp_path, evaluation={"problems": 0}), max_prompt_tokens=4
    )
    assert len(preflight(alone, task).train) == 3


def test_too_few_prompts_left(models: dict[str, str], tmp_path: Path) -> None:
    config = with_rollout(config_of(models, tmp_path), max_prompt_tokens=3)
    message = refusal(config, LongTask(), TaskError)
    assert message == (
        "rollout.prompts_per_step=2, but only 1 of 8 training problems are not longer than "
        "rollout.max_prompt_tokens=3; raise max_prompt_tokens to 4 or more (10 keeps all), or lower "
        "prompts_per_step"
    )


def test_omitted_problems_are_noted_in_the_run(tmp_path: Path) -> None:
    models = save_agents(tmp_path / "models")  # with weights
    config = with_rollout(config_of(models, tmp_path), max_prompt_tokens=6)
    result = run_locally(config, task=LongTask())
    notes = (result.folder / "notes.txt").read_text().splitlines()
    assert notes == [
        "step 0: 4 training problems are left out: their prompts are longer than "
        "rollout.max_prompt_tokens=6 for at least one agent",
        "step 0: 2 held-out problems are left out: their prompts are longer than "
        "rollout.max_prompt_tokens=6 for at least one agent",
    ]
    asked = {row["problem"] for row in RolloutLog(result.folder / "rollouts").read()}
    assert asked <= {"++:", "+++:", "++++:", "+++++:"}
