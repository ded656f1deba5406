"""Kill a run repeatedly at random moments of chosen phases, and resume it each time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl.config.load import build_config
from hacrl.config.schema import RunConfig
from hacrl.runs.checkpoint import CheckpointStore
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun
from hacrl.training.observer import Observer, Phase

PHASES = ("evaluate", "rollout", "verify", "learn", "checkpoint")  # of a step
LAST = "save"  # of the agents, when all steps are done
_CODES = {name: code for code, name in enumerate((*PHASES, LAST), start=1)}


class _PhaseReporter(Observer):
    """Writes the current phase to shared memory."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if phase in _CODES:
            self._shared.value = _CODES[phase]


def _child(config: RunConfig, shared: Any) -> None:
    """Run until killed or finished. Checkpoints are written in this thread, to report their phase."""
    os.setpgid(0, 0)
    write = CheckpointStore.write

    def told(store: CheckpointStore, *arguments: Any) -> None:
        shared.value = _CODES["checkpoint"]
        write(store, *arguments)

    CheckpointStore.write = told  # type: ignore[method-assign]
    folder = Path(config.output)
    if (folder / "config.yaml").is_file():
        found = inspect_run(folder)
        if found.finished_after is not None:
            return
        run = LocalRun(found.config, [_PhaseReporter(shared)], resumed=found.point)
    else:
        run = LocalRun(config, [_PhaseReporter(shared)], overwrite=folder.exists())
    with run:
        run.train()
        run.save()


@dataclass
class Attempts:
    """Processes that were started and killed until the run was finished."""

    kills: Counter[str] = field(default_factory=Counter)  # phase -> kills
    starts: int = 0


def run_with_kills(config: RunConfig, kills: int, seed: int) -> Attempts:
    """Kill the run ``kills`` times, evenly distributed over the phases, then let it finish."""
    rng = random.Random(seed)
    context = multiprocessing.get_context("fork")  # modules are already imported: a process starts at once
    shared = context.Value("i", 0, lock=False)
    attempts = Attempts()
    targets = [PHASES[number % len(PHASES)] for number in range(kills - kills // 10)]
    rng.shuffle(targets)
    targets += [LAST] * (kills // 10)
    while True:
        shared.value = 0
        child = context.Process(target=_child, args=(config, shared))
        child.start()
        attempts.starts += 1
        if targets and _wait_for(_CODES[targets[0]], shared, child):
            # the last phase comes only once: a late kill would find the run finished
            time.sleep(rng.uniform(0, 0.005) if targets[0] == LAST else rng.expovariate(1 / 0.01))
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            if child.exitcode == -signal.SIGKILL:
                attempts.kills[targets.pop(0)] += 1
                continue
        child.join()
        assert child.exitcode == 0, f"process {attempts.starts} ended with {child.exitcode}"
        assert not targets, f"the run was over before it could be killed in {targets}: give it more steps"
        return attempts


def _wait_for(code: int, shared: Any, child: Any) -> bool:
    while child.is_alive():
        if shared.value == code:
            return True
        time.sleep(0.0005)
    return False


def chaos_config(output: Path, steps: int, **changes: Any) -> RunConfig:
    """Two agents of different tokenizers, a checkpoint after every step."""
    agents = [
        {"name": "small", "model": "bundled:qwen-small-a"},
        {"name": "llama", "model": "bundled:llama-pairs"},
    ]
    return build_config(
        {
            "output": str(output),
            "steps": steps,
            "threads": 1,
            "agents": agents,
            "method": {"name": "hacpo", "clip_low": 0.05, "clip_high": 0.05},
            "rollout": {"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 24},
            "learning": {"lr": 2e-4, "updates_per_source": 2},
            "evaluation": {"problems": 8, "every": 3},
            "checkpoint": {"every": 1, "background": False},
            **changes,
        }
    )


def differing_files(one: Path, other: Path) -> list[str]:
    """Return the names of a run's files that differ, except those with times."""
    names = {"metrics.jsonl", "evaluations.jsonl"}
    for folder in ("agents", "rollouts"):
        for run in (one, other):
            names |= {str(path.relative_to(run)) for path in (run / folder).rglob("*") if path.is_file()}
    return [
        name
        for name in sorted(names)
        if not ((one / name).exists() and (other / name).exists())
        or (one / name).read_bytes() != (other / name).read_bytes()
    ]
