"""Hostile code in the sandbox: what it prints, and that nothing else happens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hacrl.environments.bundled.sandbox import LONGEST_CODE, SandboxLimits, check_sandbox, run_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

# The wall time is for code that waits; no test with these limits may depend on it.
LIMITS = SandboxLimits(cpu_seconds=1, wall_seconds=600, memory_mb=256, output_characters=300)


def printed(code: str) -> str:
    return run_code(code, LIMITS).as_text()


def test_this_machine_can_run_the_sandbox():
    check_sandbox()


def test_output_values_of_last_expressions_and_errors_are_shown():
    assert printed("print('one')\nx = 20\nx + 1") == "one\n21"
    assert printed("x = 1") == "(no output)"
    assert printed("from math import comb\ncomb(10, 3)") == "120"
    assert printed("def f():\n    return 1 / 0\nprint('before')\nf()") == (
        "before\nline 4, in <module>\nline 2, in f\nZeroDivisionError: division by zero"
    )
    assert printed("1 +").endswith("SyntaxError: invalid syntax")
    assert printed("raise SystemExit('done')") == "done"
    assert printed("print('é' * 3, '\ud800')").startswith("ééé")


def test_the_same_code_prints_the_same():
    code = "import random\nprint({'a', 'b', 'c', 'd', 'e'}, random.random(), hash('x'))"
    assert printed(code) == printed(code)


def test_an_endless_loop_uses_up_its_time():
    assert printed("while True: pass") == "[stopped: it used more than 1 s of CPU time]"
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert "it used more than 1 s of CPU time" in printed(ignoring)


def test_waiting_is_ended_too():
    brief = SandboxLimits(wall_seconds=0.2)
    assert run_code("import time\ntime.sleep(60)", brief).ended == "it ran for more than 0.2 s"
    closed = "import os, time\nos.close(1); os.close(2)\ntime.sleep(60)"
    assert run_code(closed, brief).ended == "it ran for more than 0.2 s"


def test_memory_is_limited():
    assert printed("x = 'x' * 10**9").endswith("MemoryError")
    assert printed("x = []\nwhile True: x.append(' ' * 10**6)").endswith("MemoryError")


def test_output_is_cut():
    result = run_code("while True: print('spam')", LIMITS)
    assert result.ended == "it printed too much"
    assert result.output.startswith("spam\nspam\n")
    assert len(result.output) < 400
    cut = run_code("print('x' * 301)", LIMITS)  # more than is shown, but not much more
    assert (cut.output, cut.ended) == ("x" * 300 + "\n[output cut]", "")


REFUSED = "PermissionError: [Errno 1] Operation not permitted"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork()",
        "import os\nos.kill(os.getppid(), 0)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.listdir('/')",
        "import os\nos.memfd_create('x')",
        "import os\nos.setuid(0)",
        "import os\nos.symlink('/etc', 'etc')",
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "open('/proc/1/mem', 'rb')",
        "open('/dev/sda', 'wb')",
    ],
)
def test_system_calls_are_refused(code: str):
    assert REFUSED in printed(code)


def test_no_file_is_written(tmp_path: Path):
    path = tmp_path / "written"
    assert REFUSED in printed(f"open({str(path)!r}, 'w').write('x')")
    assert not path.exists()


def test_no_process_no_thread_and_no_socket_can_be_made():
    assert "32512" in printed("import os\nos.system('true')")  # 127 * 256: the shell cannot start
    assert "ModuleNotFoundError" in printed("import socket")
    # The modules cannot be loaded; the calls themselves fail as well.
    libc = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    assert printed(libc + "print(libc.socket(2, 1, 0), ctypes.get_errno())") == "-1 1"  # EPERM
    assert printed(libc + "print(libc.fork(), ctypes.get_errno())") == "-1 1"
    assert printed(libc + "print(libc.ptrace(0, 0, 0, 0), ctypes.get_errno())") == "-1 1"
    assert printed(libc + "print(libc.prctl(22, 0, 0, 0, 0), ctypes.get_errno())") == "-1 1"
    assert "can't start new thread" in printed("import _thread\n_thread.start_new_thread(print, ())")


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HACRL_TEST_SECRET", "hush")
    assert printed("import os\ndict(os.environ)") == "{}"
    # Not in the process's memory either, where the kernel puts a program's environment.
    code = (
        "import ctypes\nenviron = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
        "found = []\ni = 0\n"
        "while environ and environ[i]:\n    found.append(environ[i])\n    i += 1\n"
        "any(b'HACRL_TEST_SECRET' in one for one in found)"
    )
    assert printed(code) == "False"


def test_crashes_and_exits_end_the_process_alone():
    assert "its process died (SIGSEGV)" in printed("import ctypes\nctypes.string_at(0)")
    assert printed("import os\nos._exit(3)") == "(no output)"
    assert "RecursionError" in printed("def f(): f()\nf()")


def test_no_descriptor_of_this_process_is_left_open(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("hush")
    fd = os.open(secret, os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        assert "Bad file descriptor" in printed(f"import os\nos.read({fd}, 10)")
    finally:
        os.close(fd)


def test_too_long_code_is_not_run():
    result = run_code("#" * (LONGEST_CODE + 1), LIMITS)
    assert result.ended == f"the code is longer than {LONGEST_CODE} characters"
