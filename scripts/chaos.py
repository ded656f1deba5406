"""Kill a small run with SIGKILL again and again, resume it each time, and compare it with an undisturbed one.

    python scripts/chaos.py [--kills 50] [--steps 50] [--seed 0] [--output FOLDER]

Ends with an error unless metrics, rollouts, evaluations and all agents are the same, byte for byte.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the harness is the tests'
from tests.support.chaos import chaos_config, differing_files, run_with_kills


def main() -> None:
    """Run twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.output or Path(tempfile.mkdtemp(prefix="hacrl-chaos-"))
    calm, chaos = (chaos_config(folder / name, options.steps) for name in ("calm", "chaos"))
    run_with_kills(calm, 0, options.seed)
    start = time.perf_counter()
    lives = run_with_kills(chaos, options.kills, options.seed)
    print(f"{lives.starts} lives in {time.perf_counter() - start:.0f} s, killed in {dict(lives.kills)}")
    differing = differing_files(Path(calm.output), Path(chaos.output))
    print(f"differ: {', '.join(differing)}" if differing else f"all files are the same; runs are in {folder}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
