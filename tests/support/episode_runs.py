"""Short runs of episodes: a tool environment and a text environment, two agents of two tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hacrl.config.load import build_config
from hacrl.config.schema import RunConfig
from tests.support.episode_agents import save_agents
from tests.support.episode_environments import reference


def episode_rows(problems: int = 12) -> list[dict[str, Any]]:
    """Rows that alternate between the two environments."""
    return [
        {"prompt": f"Number {n}.", "hidden": n % 9, "environment": ("tool", "text")[n % 2]}
        for n in range(problems)
    ]


def episode_config(folder: Path, name: str, steps: int = 2, **changes: Any) -> RunConfig:
    """Return the config of a run ``folder/name``; the agents are saved once in ``folder/start``."""
    start = folder / "start"
    saved = {agent: start / agent for agent in ("whole", "parts")}
    if not start.exists():
        save_agents(start)
    options = {
        "environment": {"tool": reference("GuessByTool"), "text": reference("GuessInText")},
        "train": episode_rows(),
        "test_share": 0.25,
        "max_turns": 3,
        "max_turn_tokens": 12,
        **changes.pop("options", {}),
    }
    return build_config(
        {
            "output": str(folder / name),
            "steps": steps,
            "threads": 1,
            "device": "cpu",
            "agents": [{"name": agent, "model": str(path)} for agent, path in saved.items()],
            # random agents are far from each other: bounds so wide that others' rollouts do teach
            "method": {
                "name": "hacpo",
                "clip_low": 0.2,
                "clip_high": 0.28,
                "delta": 0.9,
                "cross_upper": 10.0,
            },
            "task": {"name": "environment", "options": options},
            "rollout": {"prompts_per_step": 4, "rollouts_per_prompt": 3, "max_new_tokens": 220},
            "learning": {"lr": 1e-3, "updates_per_source": 2},
            "evaluation": {"problems": 2, "every": 2},
            "checkpoint": {"every": 1, "background": False},
            **changes,
        },
        "test",
    )
