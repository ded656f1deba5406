"""Ctrl-C and SIGTERM in a script that trains with HACRLTrainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hacrl.api.stop_signals import SAME_SIGNAL_SECONDS, STOP_SIGNALS, stop_on_first_signal
from hacrl.files import read_json

GUARD = 120.0  # seconds that nothing may take which is not stuck
FILES = ("metrics.jsonl", "agents/qwen-small-a/model.safetensors", "agents/llama-pairs/model.safetensors")

SCRIPT = """
import sys, time
from pathlib import Path
from hacrl import HACRLConfig, HACRLTrainer

output, waits = sys.argv[1], float(sys.argv[2])
calls = 0

def correct(completions, answer, **_):
    global calls
    calls += 1
    if calls == 4:  # the trial call is the first one: in the second step's first phase of two
        Path(output).with_suffix(".begun").touch()
        if waits:
            time.sleep(waits)
    return [float(text.endswith("#" + gold)) for text, gold in zip(completions, answer)]

rows = [{"prompt": f"({a}+{b})*2:", "answer": str(2 * (a + b))} for a in range(10, 20) for b in range(2, 6)]
trainer = HACRLTrainer(
    agents=["bundled:qwen-small-a", "bundled:llama-pairs"],
    reward_funcs=correct,
    train_dataset=rows,
    args=HACRLConfig(
        output=output, steps=3, threads=1, resume=True, progress="--progress" in sys.argv, seed=3,
        rollout={"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 24},
        learning={"lr": 1e-4},
    ),
)
try:
    trainer.train()
finally:
    print("after train", flush=True)
"""


@contextmanager
def training(output: Path, waits: float, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A script that waits in the second step for so many seconds."""
    script = output.with_suffix(".py")
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), str(output), str(waits), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(path: Path) -> None:
    end = time.monotonic() + GUARD
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    with training(folder, 0.0) as process:
        _, errors = process.communicate(timeout=GUARD)
    assert process.returncode == 0, errors
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize(("number", "options"), [("SIGINT", ()), ("SIGTERM", ("--progress",))])
def test_the_first_signal_saves_and_the_run_continues_exactly(
    number: str, options: tuple[str, ...], tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    folder = tmp_path / "run"
    with training(folder, 1.0, *options) as process:
        wait_for(tmp_path / "run.begun")
        process.send_signal(getattr(signal, number))
        said, errors = process.communicate(timeout=GUARD)
    assert f"{number}: finishing the current phase, then saving everything" in said + errors
    if number == "SIGINT":
        assert said.endswith("after train\n")  # KeyboardInterrupt: the script's own cleanup runs
        last = errors.splitlines()[-1]
        assert last.startswith(f"KeyboardInterrupt: stopped after 1 steps; everything is saved in {folder}.")
        assert "HACRLConfig(resume=True" in last
        assert process.returncode != 0
    else:
        assert process.returncode == -signal.SIGTERM  # as without hacrl
    assert read_json(folder / "status.json", folder)["state"] == "stopped"
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert names == ["step-000001-01"]  # the step under way, too
    with training(folder, 0.0, *options) as process:
        _, errors = process.communicate(timeout=GUARD)
    assert process.returncode == 0, errors
    assert {name: (folder / name).read_bytes() for name in FILES} == undisturbed


def test_the_second_signal_ends_at_once_without_saving(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with training(folder, 10 * GUARD) as process:
        wait_for(tmp_path / "run.begun")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "a second signal ends at once, without saving" in process.stderr.readline()
        time.sleep(SAME_SIGNAL_SECONDS + 0.2)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=GUARD)
    assert process.returncode != 0
    assert said == "after train\n"
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert not (folder / "checkpoints").exists()


def test_handlers_of_the_program_are_left_alone_and_ours_are_removed() -> None:
    own: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    try:
        handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
        stops: list[str] = []
        with suppress(RuntimeError), stop_on_first_signal(lambda: stops.append("stop"), stops.append) as got:
            os.kill(os.getpid(), signal.SIGTERM)
            assert own == [signal.SIGTERM]
            assert got.number is None
            os.kill(os.getpid(), signal.SIGINT)
            assert stops[0] == "stop"
            assert got.number is signal.SIGINT
            raise RuntimeError
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
        with pytest.raises(KeyboardInterrupt, match="saved in x"):
            got.deliver("saved in x")
    finally:
        signal.signal(signal.SIGTERM, before)
