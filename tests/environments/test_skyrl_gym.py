"""Environments of skyrl-gym in the text form, with the real package."""

from __future__ import annotations

import pytest

from hacrl.errors import TaskError

pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed (pip install 'hacrl[skyrl-gym]')")

from hacrl.environments.adapters.skyrl_gym import SkyRLGym, added_text


def test_a_registered_environment_of_one_turn():
    environment = SkyRLGym("gsm8k")
    assert environment.reset(prompt="What is 6 times 7?", answer="42") == ""
    assert environment.step("6 * 7 = 42\n#### 42") == ("", 1.0, True)
    environment.reset(prompt="What is 6 times 7?", answer="42")
    assert environment.step("#### 41") == ("", 0.0, True)


def test_several_turns_with_rewards_of_turns():
    environment = SkyRLGym("gsm8k_multi_turn", max_turns=3)
    environment.reset(prompt="What is 6 times 7?", answer="42")
    # A wrong answer in the right format earns 0.2 / max_turns = 0.2 / 3.
    first, reward, done = environment.step("#### 41")
    assert "tentative numeric answer" in first
    assert reward == pytest.approx(0.2 / 3)
    assert not done
    second, reward, done = environment.step("I do not know")
    assert (second, reward, done) == (
        "Now provide only the final numeric answer in the exact format: '#### ANSWER'.",
        0.0,
        False,
    )
    assert environment.step("#### 42") == ("", 1.0, True)


def test_the_rows_own_extras_come_first():
    environment = SkyRLGym("gsm8k_multi_turn", max_turns=3)
    environment.reset(prompt="?", answer="1", reward_spec={"ground_truth": "7"}, max_turns=1)
    observation, reward, done = environment.step("#### 1")  # wrong by the row's own ground truth
    assert (observation, done) == ("", True)  # the row allows one turn
    assert reward == pytest.approx(0.2)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(TaskError, match="skyrl-gym has no 'gsm9k'; it has aime, gsm8k"):
        SkyRLGym("gsm9k")


def test_text_that_init_adds_to_the_prompt_is_the_opening_and_nothing_else_may_change():
    asked = [{"role": "user", "content": "Play."}]
    assert added_text(asked, [{"role": "user", "content": "Play. Board: 1"}]) == " Board: 1"
    with pytest.raises(ValueError, match="changes the conversation"):
        added_text(asked, [{"role": "system", "content": "Be brief."}, *asked])
    with pytest.raises(ValueError, match="changes the conversation"):
        added_text(asked, [{"role": "user", "content": "Do not play."}])


def test_a_changed_action_is_refused_instead_of_trained_on():
    environment = SkyRLGym("tests.support.skyrl_cutting:Cutting")
    environment.reset(prompt="?", answer="")
    assert environment.step("short") == ("next", 0.0, False)
    with pytest.raises(ValueError, match="postprocessed_action"):
        environment.step("keep<end>drop")
