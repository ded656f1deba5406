"""Run Triton kernels without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def interpreted(check: str) -> None:
    """Run a program under Triton's interpreter, and assert that it prints "all the same" at its end."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in (os.getcwd(), *sys.path) if entry)
    ended = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.stdout.strip().endswith("all the same"), ended.stderr[-3000:]
