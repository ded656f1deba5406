"""Named variants of a recipe: the baselines and the ablations of the paper.

A variant changes only the settings that define it. ``gspo@lr=1e-4`` is the variant ``gspo`` with one
override, ``gspo@lr=1e-4@steps=50`` with two. ``module:attribute`` is a method of the user's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hacrl.config.load import apply_override, with_names
from hacrl.config.schema import AgentSettings, LearningSettings, RolloutSettings
from hacrl.errors import ConfigError
from hacrl.plugins import is_reference

Recipe = dict[str, Any]
# Method keys that a variant takes over from the recipe: all variants, and those with a sequence-level ratio.
_READING = ("reading", "learn_stop_token", "minibatch_order")
_OWN_CLIP = (*_READING, "clip_low", "clip_high", "kl_coefficient")


def _method(name: str, **options: Any) -> Callable[[Recipe], None]:
    """Return a change to another method with the recipe's clipping, or to other options of its method."""

    def change(recipe: Recipe) -> None:
        current = recipe["method"]
        if current["name"] != name:
            current = {key: current[key] for key in _OWN_CLIP if key in current}
        recipe["method"] = {**current, "name": name, **options}

    return change


def _token_level(recipe: Recipe) -> None:
    """GRPO's ratio is per token: the recipe's sequence-level clip range does not carry over."""
    current = recipe["method"]
    recipe["method"] = {"name": "grpo", **{key: current[key] for key in _READING if key in current}}


def _times_two(recipe: Recipe) -> None:
    """Use GSPO with twice the responses and twice the updates, at twice the rollout cost."""
    _method("gspo")(recipe)
    rollout, learning = recipe.setdefault("rollout", {}), recipe.setdefault("learning", {})
    _double(rollout, "rollouts_per_prompt", RolloutSettings.rollouts_per_prompt)
    _double(learning, "updates_per_source", LearningSettings.updates_per_source)
    _double(learning, "updates_per_step", LearningSettings.updates_per_step)
    for agent in recipe["agents"]:
        _double(agent, "rollouts_per_prompt", AgentSettings.rollouts_per_prompt)


def _double(section: dict[str, Any], key: str, default: int | None) -> None:
    """Double a value or its default; None (not set) stays None."""
    value = section.get(key, default)
    if value is not None:
        section[key] = 2 * value


def _same_updates(recipe: Recipe) -> None:
    """Use GSPO with as many updates as with sharing: one epoch over own responses per agent."""
    _method("gspo")(recipe)
    learning = recipe.setdefault("learning", {})
    learning["epochs"] = len(recipe["agents"]) * learning.get("epochs", 1)


VARIANTS: dict[str, Callable[[Recipe], None]] = {
    "hacpo": _method("hacpo"),
    "gspo": _method("gspo"),
    "grpo": _token_level,
    "naive": _method("naive"),
    "success_gated": _method("success_gated"),
    "xgrpo": _method("xgrpo"),
    "ftis": _method("ftis"),
    "sapo": _method("sapo"),
    "s2l_po": _method("s2l_po"),
    "aligned": _method("aligned"),
    "gspo_x2": _times_two,
    "gspo_same_updates": _same_updates,
    "hacpo_no_baseline": _method("hacpo", capability_baseline=False),
    "hacpo_no_discrepancy": _method("hacpo", discrepancy=False),
    "hacpo_alpha_0": _method("hacpo", alpha=0.0),
    "hacpo_alpha_2": _method("hacpo", alpha=2.0),
    "hacpo_alpha_3": _method("hacpo", alpha=3.0),
    "hacpo_no_clip": _method("hacpo", cross_clip=False),
    "hacpo_no_stepwise": _method("hacpo", delta_step=0.0),
}


def variant_recipe(recipe: Recipe, variant: str) -> Recipe:
    """Return a copy of the recipe under a variant, e.g. ``gspo_x2`` or ``gspo@lr=1e-4``."""
    name, *overrides = variant.split("@")
    change = _method(name) if is_reference(name) else VARIANTS.get(name)
    if change is None:
        raise ConfigError(f"there is no variant {name!r}; there are {', '.join(VARIANTS)}")
    varied = with_names(copy.deepcopy(recipe))
    change(varied)
    for override in overrides:
        apply_override(varied, override)
    return varied
