"""Variants of a recipe, and studies over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from hacrl.cli.compare import jobs_at_a_time
from hacrl.cli.main import app
from hacrl.config.checks import updates_per_step
from hacrl.config.load import build_config, read_recipe
from hacrl.errors import ConfigError
from hacrl.report.colours import BEFORE_COLOUR, METHOD_COLOURS, OTHER_COLOUR, line_styles, method_colour
from hacrl.studies.compare import plan_runs
from hacrl.studies.variants import VARIANTS, variant_recipe

# every variant of the demo's recipe; S2L-PO must be told who explores
ALL = [f"{name}@method.explorer=small" if name == "s2l_po" else name for name in VARIANTS]


def built(variant: str):
    return build_config({**variant_recipe(read_recipe(Path("demo")), variant), "output": "x"})


def test_variants_change_what_they_say_and_keep_the_rest():
    # the demo: 3 agents, G = 8, 2 updates per source
    costs = {
        name: (built(name).rollout.rollouts_per_prompt, updates_per_step(built(name)))
        for name in (
            "hacpo",
            "naive",
            "gspo",
            "gspo_x2",
            "gspo_same_updates",
            "success_gated",
            "xgrpo",
            "ftis",
            "sapo",
            "s2l_po@method.explorer=small",
        )
    }
    assert costs == {
        "hacpo": (8, 6),
        "naive": (8, 6),
        "gspo": (8, 2),
        "gspo_x2": (16, 4),
        "gspo_same_updates": (8, 6),
        "success_gated": (8, 2),
        "xgrpo": (8, 2),
        "ftis": (8, 6),
        "sapo": (8, 6),
        "s2l_po@method.explorer=small": (8, 2),
    }
    assert built("hacpo").method.alpha == 1.0
    assert built("hacpo_alpha_3").method.alpha == 3.0
    assert built("hacpo_no_stepwise").method.delta_step == 0.0
    assert built("hacpo_no_clip").method.cross_clip is False
    assert built("hacpo_no_baseline").method.capability_baseline is False
    assert built("hacpo_no_discrepancy").method.discrepancy is False
    for name in ("gspo", "naive", "gspo_x2"):  # the recipe's own-response clip range, not the default
        assert built(name).method.clip_low == 0.05
    assert built("grpo").method.clip_low == 0.2
    assert built("gspo@lr=1e-3@steps=7").learning.lr == 1e-3
    assert built("gspo@lr=1e-3@steps=7").steps == 7
    for name in ALL:
        assert built(name).learning.lr == 2e-4


def test_gspo_x2_doubles_an_agents_own_group_too():
    recipe = read_recipe(Path("demo"))
    recipe["agents"][0]["rollouts_per_prompt"] = 3
    config = build_config({**variant_recipe(recipe, "gspo_x2"), "output": "x"})
    assert [config.rollouts_per_prompt(agent) for agent in config.agents] == [6, 16, 16]


def test_variants_keep_the_recipes_reading_of_the_paper():
    recipe = read_recipe(Path("demo"))
    recipe["method"] |= {"reading": "public", "learn_stop_token": True}
    for name in ALL:
        method = build_config({**variant_recipe(recipe, name), "output": "x"}).method
        choices = method.choices
        assert (method.reading, choices.learn_stop_token, choices.minibatch_order) == (
            "public",
            True,
            "self_first",
        ), name


def test_a_method_given_by_its_name_alone_can_be_varied():
    recipe = {**read_recipe(Path("demo")), "method": "gspo"}
    assert variant_recipe(recipe, "gspo_x2")["method"] == {"name": "gspo"}
    assert variant_recipe(recipe, "hacpo_alpha_3")["method"] == {"name": "hacpo", "alpha": 3.0}
    recipe.pop("method")  # HACPO unless named
    assert variant_recipe(recipe, "naive")["method"] == {"name": "naive"}


@pytest.mark.parametrize(
    ("explorer", "message"),
    [
        ("", "method.explorer: name the agent that explores for the others, of small, large, llama"),
        ("@method.explorer=nobody", "there is no agent 'nobody', there are small, large, llama"),
    ],
)
def test_s2l_po_needs_an_agent_that_explores(explorer: str, message: str):
    with pytest.raises(ConfigError, match=message):
        built(f"s2l_po{explorer}")


def test_unknown_variants_are_named():
    with pytest.raises(ConfigError, match=r"no variant 'gspo3'.*gspo_x2"):
        variant_recipe({}, "gspo3")


def test_impossible_studies_are_refused(tmp_path):
    demo = read_recipe(Path("demo"))
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(64)))
    task = {
        "name": "reward",
        "options": {
            "train": str(tmp_path / "prompts.jsonl"),
            "functions": ["tests.tasks.reward_examples:length"],
        },
    }
    with pytest.raises(ConfigError, match="task 'reward' holds out no problems: give"):
        plan_runs({**demo, "task": task, "evaluation": {}}, ["gspo"], 1, tmp_path)
    with pytest.raises(ConfigError, match="--output FOLDER"):
        plan_runs({**demo, "output": "x"}, ["gspo"], 1, tmp_path)
    with pytest.raises(ConfigError, match="must not be 0"):
        plan_runs({**demo, "steps": 0}, ["gspo"], 1, tmp_path)
    with pytest.raises(ConfigError, match="agents: missing"):
        plan_runs({"steps": 3}, ["gspo_x2"], 1, tmp_path)
    with pytest.raises(ConfigError, match="rollout"):
        plan_runs({**demo, "rollout": None}, ["gspo_x2"], 1, tmp_path)
    seeds = [run.seed for run in plan_runs({**demo, "seed": 7}, ["gspo", "hacpo"], 2, tmp_path)]
    assert seeds == [7, 7, 8, 8]


def test_gspo_x2_doubles_a_given_number_of_updates_too():
    recipe = {**read_recipe(Path("demo")), "learning": {"updates_per_step": 3}}
    config = build_config({**variant_recipe(recipe, "gspo_x2"), "output": "x"})
    assert updates_per_step(config) == 6


def test_a_study_keeps_no_checkpoints_unless_asked_to(tmp_path):
    demo = read_recipe(Path("demo"))
    (plain,) = plan_runs(demo, ["gspo"], 1, tmp_path)
    assert plain.config.checkpoint.every == 0
    (asked,) = plan_runs({**demo, "checkpoint": {"every": 5}}, ["gspo"], 1, tmp_path)
    assert asked.config.checkpoint.every == 5


def test_a_method_has_one_colour_in_every_plot():
    """All variants differ in colour; overrides keep the colour and change the line style."""
    colours = [method_colour(variant) for variant in VARIANTS]
    assert len(set(colours)) == len(VARIANTS) == 19
    assert {OTHER_COLOUR, BEFORE_COLOUR}.isdisjoint(colours)
    assert method_colour("gspo@lr=1e-4@steps=50") == METHOD_COLOURS["gspo"] == "#0072B2"
    assert method_colour("hacpo") == "#D55E00"
    assert method_colour("a stranger's") == OTHER_COLOUR
    assert line_styles(["gspo", "hacpo", "gspo@lr=1e-4", "gspo@lr=1e-5", "a", "b"]) == {
        "gspo": "-",
        "hacpo": "-",
        "gspo@lr=1e-4": "--",
        "gspo@lr=1e-5": ":",
        "a": "-",
        "b": "--",
    }


@pytest.mark.parametrize(("text", "jobs"), [("3", 3), ("auto", None)])
def test_the_number_of_jobs(text: str, jobs: int | None):
    assert jobs_at_a_time(text) == jobs


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_other_jobs_are_refused(text: str):
    with pytest.raises(ConfigError, match="must be a whole number above 0, or auto"):
        jobs_at_a_time(text)


def test_options_of_benchmarks_need_benchmarks():
    with pytest.raises(ConfigError, match="--limit, --max-new-tokens and --data are of --on"):
        app(["compare", "demo", "--limit", "3"], standalone_mode=False)
