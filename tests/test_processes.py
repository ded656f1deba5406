"""Supervision of a program and its children, with real processes."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hacrl import processes
from hacrl.engines.vllm.client import ServerClient
from hacrl.processes import Guard, MessageProcess, ProcessError, ProcessLostError, SupervisedProcess

PARENT = """
import signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", child.pid, flush=True)
time.sleep(600)
"""


def server(
    tmp_path: Path, code: str = PARENT, *arguments: str, start_timeout: float = 60
) -> SupervisedProcess:
    command = [sys.executable, "-c", code, *arguments]
    return SupervisedProcess("the server", command, {"A_KEY": "secret"}, tmp_path / "log", start_timeout)


def child_of(process: SupervisedProcess) -> int:
    return int(process.log.read_text().split("pids ")[-1].split()[0])


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def soon(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60  # a hang guard
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def ready(process: SupervisedProcess) -> Callable[[], bool]:
    return lambda: process.is_alive() and "pids" in process.log.read_text()


@pytest.mark.parametrize("kind", ["", "deaf"])
def test_a_program_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(processes, "TERMINATE_SECONDS", 0.5)
    process = server(tmp_path, PARENT, kind)
    process.start(ready(process))
    pid, child = process.pid, child_of(process)
    assert pid is not None
    assert is_there(pid)
    assert is_there(child)
    process.end()
    process.end()
    assert not process.is_alive()
    assert process.pid is None
    assert soon(lambda: not is_there(pid) and not is_there(child))


def test_children_of_a_dead_program_end_before_the_next_start(tmp_path: Path) -> None:
    process = server(tmp_path)
    process.start(ready(process))
    first, orphan = process.pid, child_of(process)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert soon(lambda: not process.is_alive())
    assert is_there(orphan)
    log = process.log.read_text()
    process.start(lambda: process.is_alive() and process.log.read_text() != log)
    assert soon(lambda: not is_there(orphan))
    assert process.pid != first
    process.end()


def test_a_program_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("OldError: of an earlier server\n")
    code = "import sys; print('starting'); sys.stderr.write('ValueError: no such model\\n'); sys.exit(3)"
    with pytest.raises(ProcessError) as caught:
        server(tmp_path, code).start(lambda: False)
    assert "the server does not start (exit code 3)" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert "ValueError: no such model" in str(caught.value)
    assert "OldError" not in str(caught.value)


def test_a_program_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    process = server(tmp_path, PARENT, start_timeout=1.0)
    pids: list[int] = []

    def never() -> bool:
        pids.extend([process.pid] if process.pid else [])
        return False

    with pytest.raises(ProcessLostError, match=r"not ready after 1 s;"):
        process.start(never)
    assert pids
    assert not is_there(pids[0])


def test_the_environment_is_added_to_ours(tmp_path: Path) -> None:
    code = "import os; print('key', os.environ['A_KEY'], 'PATH' in os.environ)"
    with pytest.raises(ProcessError, match="key secret True"):
        server(tmp_path, code).start(lambda: False)


def test_an_address_with_another_server_is_refused(tmp_path: Path) -> None:
    """Weights would go to a server of another run."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        client = ServerClient("other", f"http://127.0.0.1:{other.server_port}", None)
        with pytest.raises(ProcessError, match="another server answers at its address already"):
            server(tmp_path).start(client.is_healthy)
        other.shutdown()
    assert not (tmp_path / "log").exists()


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


KILLED = """
import sys
from pathlib import Path
from hacrl.processes import SupervisedProcess

command = [sys.executable, "-c", sys.argv[1], *sys.argv[3:]]
process = SupervisedProcess("the server", command, {}, Path(sys.argv[2]), 600)
process.start(lambda: False)
"""


@pytest.mark.parametrize("kind", ["", "deaf"])
def test_a_program_ends_even_if_hacrl_is_killed(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    hacrl = subprocess.Popen([sys.executable, "-c", KILLED, PARENT, str(log), kind])
    assert soon(lambda: log.exists() and "pids" in log.read_text())
    child = int(log.read_text().split()[1])
    (parent,) = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_there(int(entry.name)) and child in children_of(int(entry.name))
    ]
    hacrl.kill()
    hacrl.wait()
    assert soon(lambda: not is_there(parent) and not is_there(child))


def children_of(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_a_guard_ends_when_its_targets_have_ended() -> None:
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    guard = Guard([watched.pid])
    pid = guard.pid
    assert is_there(pid)
    watched.kill()
    watched.wait()
    assert soon(lambda: not is_there(pid))
    guard.end()
    assert is_there(other.pid)
    other.kill()
    other.wait()


def test_a_dismissed_guard_leaves_its_targets_alone() -> None:
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Guard([watched.pid]).end()
    assert watched.poll() is None
    watched.kill()
    watched.wait()


ECHO = """
import subprocess, sys
from hacrl.processes import receive_message, send_message
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
send_message(1, {"child": child.pid})
while (message := receive_message(0)) is not None:
    send_message(1, message)
sys.exit("the end")
"""


def echo() -> tuple[MessageProcess, int]:
    """A process that repeats each message, and the process that it has started."""
    process = MessageProcess([sys.executable, "-c", ECHO], os.environ, keeps_errors=True)
    started = process.receive()
    assert started is not None
    return process, started["child"]


def test_messages_arrive_whole_and_a_killed_process_takes_its_children_along() -> None:
    process, child = echo()
    assert not process.has_reply()
    for message in (
        {"text": "\ud800 \u00e9"},
        {"long": "x" * 300_000},
    ):
        assert process.send(message)
        assert process.receive() == message
    assert process.send({"long": "x" * 2_000})
    assert process.receive(longest=1_000) is None
    pid = process.pid
    process.kill()
    process.kill()
    assert process.exit_code == -signal.SIGKILL
    assert not process.send({})
    assert soon(lambda: not is_there(pid) and not is_there(child))


def test_a_process_that_ends_by_itself_says_why() -> None:
    process, child = echo()
    process._requests.close()
    assert soon(lambda: process.exit_code == 1)
    assert process.last_error() == "the end"
    assert is_there(child)
    process.kill()
    assert soon(lambda: not is_there(child))


def test_a_forked_process_does_not_end_its_parents_children() -> None:
    process, _ = echo()
    forked = os.fork()
    if forked == 0:
        process.kill()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    assert process.send({"still": "there"})
    assert process.receive() == {"still": "there"}
    process.kill()
