"""OpenEnv's environments in the text form, with the real package."""

from __future__ import annotations

import random

import pytest

from hacrl.errors import TaskError

pytest.importorskip("openenv.core", reason="openenv is not installed (pip install 'hacrl[openenv]')")

from hacrl.environments.adapters.openenv import OpenEnv
from hacrl.types import Turn
from tests.tasks.helpers import build
from tests.tasks.test_bundled import play

MODULE = "tests.support.openenv_number"


def number_game(**options) -> OpenEnv:
    return OpenEnv(f"{MODULE}:NumberGame", f"{MODULE}:Guess", **options)


def test_a_text_becomes_the_only_field_of_the_action_and_observations_become_text():
    game = number_game(options={"largest": 20})
    hidden = random.Random(7).randint(1, 20)
    assert game.reset(seed=7, prompt="Play.", answer="") == "Guess a number from 1 to 20."
    assert game.step(str(hidden - 1)) == ("Higher.", -0.25, False)
    assert game.step(f" {hidden + 1}\n") == ("Lower.", -0.25, False)
    # done and reward are not part of the text, and neither is the metadata, which names the secret here
    assert game.step(str(hidden)) == ("Right.", 1.0, True)


def test_an_action_may_be_written_as_json():
    game = number_game()
    game.reset(seed=7)
    hidden = random.Random(7).randint(1, 100)
    assert game.step(f'{{"number": {hidden}}}') == ("Right.", 1.0, True)


def test_a_text_that_is_no_action_is_answered_with_what_is_wrong():
    game = number_game()
    game.reset(seed=7)
    observation, reward, done = game.step("fifty?")
    assert observation.startswith("Error: number: Input should be a valid integer")
    assert (reward, done) == (0.0, False)


def test_an_action_of_several_fields_must_be_json_and_other_columns_reach_reset():
    walk = OpenEnv(f"{MODULE}:Walk", f"{MODULE}:Move")
    assert walk.reset(start=1, prompt="Walk.") == '{"x": 1, "y": 0}'
    assert walk.step("right") == ("Error: the action must be a JSON object with the fields x, y", 0.0, False)
    assert walk.step('{"x": 1}') == ("Error: y: Field required", 0.0, False)
    assert walk.step('{"x": 1, "y": 5}') == ('{"x": 2, "y": 5}', 0.0, False)
    assert walk.step('{"x": 1, "y": 0}') == ('{"x": 3, "y": 5}', 1.0, True)


def test_one_field_of_the_observation_can_be_chosen():
    walk = OpenEnv(f"{MODULE}:Walk", f"{MODULE}:Move", observation_field="y")
    assert walk.reset() == "0"
    assert walk.step('{"x": 0, "y": 5}') == ("5", 0.0, False)


def test_a_field_that_the_action_does_not_have_is_an_error():
    with pytest.raises(TaskError, match="the action has the fields metadata, number"):
        number_game(action_field="guess")


def test_the_task_plays_in_the_pool_as_in_a_run():
    options = {"environment": f"{MODULE}:NumberGame", "action": f"{MODULE}:Guess"}
    task = build(
        "environment",
        environment={"factory": "hacrl.environments.adapters.openenv:OpenEnv", "options": options},
        train=[{"prompt": "Play.", "seed": 7}],
    )
    hidden = random.Random(7).randint(1, 100)
    with task.open_environments() as pool:
        answers, reward, done = play(
            pool, task.train[0], [Turn("assistant", str(guess)) for guess in (hidden - 1, hidden)]
        )
    assert answers == ["Guess a number from 1 to 100.", "Higher.", "Right."]
    assert (reward, done) == (1.0, True)  # of the last turn; hacrl adds up those of all turns
