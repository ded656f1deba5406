"""The worker pool: limits, deaths, threads, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.math import pool as pool_module
from hacrl.tasks.math import process as process_module
from hacrl.tasks.math.pool import MathVerifier

SYMBOLIC = [
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"\sqrt{8}", r"\boxed{3\sqrt{2}}"),
    ("(x+1)^2", r"\boxed{x^2+2x+1}"),
]
SYMBOLIC_LABELS = ["correct", "wrong", "correct"]
ENDLESS = (r"\sqrt{8}", r"\boxed{9^{9^{9^{9}}}}")


def labels(verifier: MathVerifier, pairs: list[tuple[str, str]]) -> list[str]:
    return [verdict.label for verdict in verifier.verify(pairs)]


def is_alive(pid: int) -> bool:
    """Whether the process exists, zombies included."""
    return Path(f"/proc/{pid}").exists()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):  # a hang guard only
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited 30 s in vain")


def test_plain_answers_need_no_worker():
    with MathVerifier() as verifier:
        assert labels(verifier, [("5", r"\boxed{5}"), ("5", r"\boxed{6}"), ("5", "5")]) == [
            "correct",
            "wrong",
            "unparsable",
        ]
        assert verifier.worker_pids() == []


def test_a_hanging_pair_times_out_and_the_others_are_judged():
    pairs = [SYMBOLIC[0], ENDLESS, *SYMBOLIC]
    with MathVerifier(VerifierSettings(workers=1, time_limit=1.0)) as verifier:
        verifier.verify(SYMBOLIC[:1])
        (first,) = verifier.worker_pids()
        assert labels(verifier, pairs) == ["correct", "timeout", *SYMBOLIC_LABELS]
        (second,) = verifier.worker_pids()
        assert second != first
        assert not is_alive(first)
        # Not remembered: the next call tries again.
        assert labels(verifier, [ENDLESS]) == ["timeout"]
        assert not is_alive(second)


def test_a_worker_killed_while_judging_costs_one_verdict():
    with MathVerifier(VerifierSettings(workers=1, time_limit=120.0)) as verifier:
        verifier.verify(SYMBOLIC[:1])
        (first,) = verifier.worker_pids()

        def kill_when_busy() -> None:
            worker = verifier._workers[0]
            wait_until(lambda: worker.pair == (ENDLESS[0], "9^{9^{9^{9}}}"))
            os.kill(first, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_busy)
        killer.start()
        assert labels(verifier, [ENDLESS, *SYMBOLIC]) == ["crash", *SYMBOLIC_LABELS]
        killer.join()
        assert verifier.worker_pids() != [first]
        assert not is_alive(first)


def test_a_worker_that_died_idle_costs_nothing():
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0)) as verifier:
        verifier.verify(SYMBOLIC[:1])
        (first,) = verifier.worker_pids()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: verifier._workers[0].process.exit_code is not None)
        assert labels(verifier, SYMBOLIC[1:]) == SYMBOLIC_LABELS[1:]
        assert first not in verifier.worker_pids()


def patch_worker(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let every worker run this code when it starts."""
    (folder / "sitecustomize.py").write_text(code)
    real = process_module._environment()
    patched = {**real, "PYTHONPATH": f"{folder}{os.pathsep}{real['PYTHONPATH']}"}
    monkeypatch.setattr(process_module, "_environment", lambda: patched)


def test_too_much_memory_ends_one_pair_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pair that asks for 4 GiB, never touched, meets the worker's limit of 1 GiB."""
    patch_worker(
        monkeypatch,
        tmp_path,
        "import json\nreal = json.loads\n"
        "def loads(text):\n    return (b'hungry' in text and bytearray(4 * 2**30) and None) or real(text)\n"
        "json.loads = loads\n",
    )
    pairs = [("x", r"\boxed{hungry^2}"), *SYMBOLIC]
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0, memory_limit=1.0)) as verifier:
        assert labels(verifier, pairs) == ["crash", *SYMBOLIC_LABELS]
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0, memory_limit=None)) as verifier:
        assert labels(verifier, pairs) == ["wrong", *SYMBOLIC_LABELS]


def test_a_worker_that_sleeps_is_killed_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It uses no CPU time, so the limit of the kernel never strikes."""
    code = (
        "import json, time\nreal = json.loads\n"
        "json.loads = lambda text: (b'sleepy' in text and time.sleep(9e9)) or real(text)\n"
    )
    patch_worker(monkeypatch, tmp_path, code)
    with MathVerifier(VerifierSettings(workers=1, time_limit=0.5)) as verifier:
        assert labels(verifier, [("x", r"\boxed{sleepy^2}"), *SYMBOLIC]) == ["timeout", *SYMBOLIC_LABELS]


def test_verdicts_keep_their_order_over_several_workers():
    golds = [rf"\sqrt{{{n}}}" for n in range(2, 32)]
    pairs = [
        (gold, rf"\boxed{{\sqrt{{{n + (n % 3 == 0)}}}\cdot 1}}") for n, gold in enumerate(golds, start=2)
    ]
    with MathVerifier(VerifierSettings(workers=3, time_limit=60.0)) as verifier:
        assert labels(verifier, pairs) == ["wrong" if n % 3 == 0 else "correct" for n in range(2, 32)]
        assert 1 <= len(verifier.worker_pids()) <= 3


def test_equal_pairs_are_judged_once(monkeypatch: pytest.MonkeyPatch):
    asked = []
    real = process_module.Worker.ask

    def counting(self: process_module.Worker, pair: tuple[str, str], time_limit: float) -> bool:
        asked.append(pair)
        return real(self, pair, time_limit)

    monkeypatch.setattr(process_module.Worker, "ask", counting)
    with MathVerifier(VerifierSettings(workers=2, time_limit=60.0)) as verifier:
        # Other words around the same box are the same pair.
        pairs = [SYMBOLIC[0], (SYMBOLIC[0][0], "Therefore " + SYMBOLIC[0][1]), SYMBOLIC[1], SYMBOLIC[0]]
        assert labels(verifier, pairs) == ["correct", "correct", "wrong", "correct"]
        assert labels(verifier, pairs) == ["correct", "correct", "wrong", "correct"]
    assert len(asked) == 2


def test_no_process_is_left_behind():
    verifier = MathVerifier(VerifierSettings(workers=2, time_limit=60.0))
    verifier.verify(SYMBOLIC)
    pids = verifier.worker_pids()
    assert pids
    assert all(is_alive(pid) for pid in pids)
    verifier.close()
    assert not any(is_alive(pid) for pid in pids)
    verifier.close()
    assert labels(verifier, SYMBOLIC[:1]) == ["correct"]  # known from before
    assert verifier.worker_pids() == []
    assert labels(verifier, [(r"\sqrt{8}", r"\boxed{4\sqrt{2}}")]) == ["wrong"]  # a new worker
    pids = verifier.worker_pids()
    del verifier  # the finaliser
    assert pids
    assert not any(is_alive(pid) for pid in pids)


def test_an_interrupt_leaves_no_stale_reply(monkeypatch: pytest.MonkeyPatch):
    """A worker interrupted in the middle is dropped: its late reply must not answer the next question."""
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0)) as verifier:
        verifier.verify(SYMBOLIC[:1])
        (first,) = verifier.worker_pids()

        def interrupted() -> list[process_module.Worker]:
            raise KeyboardInterrupt

        monkeypatch.setattr(verifier, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            verifier.verify(SYMBOLIC[2:])
        monkeypatch.undo()
        assert not is_alive(first)
        assert labels(verifier, SYMBOLIC[1:]) == SYMBOLIC_LABELS[1:]


def test_works_in_another_thread_and_in_several_at_once():
    """math-verify alone fails off the main thread, in silence."""
    results: list[list[str]] = []
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0)) as verifier:
        threads = [
            threading.Thread(target=lambda: results.append(labels(verifier, SYMBOLIC))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [SYMBOLIC_LABELS] * 3


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path):
    """multiprocessing would run the script again in every worker; and its modules must not shadow ours."""
    script = tmp_path / "script.py"
    script.write_text(
        "from hacrl.tasks.math.pool import MathVerifier\n"
        "print('started')\n"
        f"print([v.label for v in MathVerifier().verify({SYMBOLIC!r})])\n"
    )
    (tmp_path / "sympy.py").write_text("raise SystemExit('the wrong sympy')\n")
    done = subprocess.run(
        [sys.executable, "-P", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["started", str(SYMBOLIC_LABELS)]
    assert done.stderr == ""


def test_a_worker_imports_neither_torch_nor_the_rest_of_hacrl():
    code = (
        "import sys, json, hacrl.tasks.math.worker as w; w._warm_up()\n"
        "heavy = ('torch', 'transformers', 'hacrl', 'numpy')\n"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] in heavy]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "hacrl.tasks.math.symbolic" in loaded
    assert {m for m in loaded if not m.startswith("hacrl.tasks.math.")} == {
        "hacrl",
        "hacrl.processes",
        "hacrl.tasks",
        "hacrl.tasks.math",
    }


def test_a_worker_that_cannot_import_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math_verify here')\n")
    patch_worker(monkeypatch, tmp_path, "")
    with MathVerifier(VerifierSettings(workers=2)) as verifier:
        with pytest.raises(TaskError, match="no math_verify here"):
            verifier.verify(SYMBOLIC)
        assert labels(verifier, [("5", r"\boxed{5}")]) == ["correct"]  # plain answers still work


def test_workers_that_die_while_starting_are_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    started = []
    real = pool_module.Worker

    def counting(settings: VerifierSettings) -> process_module.Worker:
        started.append(1)
        return real(settings)

    monkeypatch.setattr(pool_module, "Worker", counting)
    with MathVerifier(VerifierSettings(workers=1)) as verifier, pytest.raises(TaskError, match="exit code 1"):
        verifier.verify(SYMBOLIC)
    assert len(started) == 3


def test_prints_of_a_library_do_not_disturb_the_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patch_worker(
        monkeypatch,
        tmp_path,
        "import json, sys\nreal = json.loads\n"
        "def noisy(text):\n"
        "    print('noise on stdout', flush=True)\n"
        "    sys.stderr.write('noise on stderr')\n"
        "    return real(text)\n"
        "json.loads = noisy\n",
    )
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0)) as verifier:
        assert labels(verifier, SYMBOLIC) == SYMBOLIC_LABELS


def test_a_forked_child_leaves_its_parents_workers_alone():
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0)) as verifier:
        verifier.verify(SYMBOLIC[:1])
        (worker,) = verifier.worker_pids()
        child = os.fork()
        if child == 0:
            verifier.close()
            os._exit(0 if verifier.worker_pids() == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_alive(worker)
        assert labels(verifier, SYMBOLIC[1:]) == SYMBOLIC_LABELS[1:]
        assert verifier.worker_pids() == [worker]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workers", 0),
        ("time_limit", 0.0),
        ("time_limit", float("nan")),
        ("time_limit", float("inf")),
        ("memory_limit", 0.1),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: float):
    with pytest.raises(ValueError, match=key):
        VerifierSettings(**{key: value})


def test_worker_count_follows_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert VerifierSettings().worker_count == 8
    assert VerifierSettings(workers=12).worker_count == 12
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert VerifierSettings().worker_count == 1
