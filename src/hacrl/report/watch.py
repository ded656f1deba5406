"""Serve a run's page while it trains: on loopback, behind a secret address, kept up to date by events.

One thread reads the run's files, whatever the number of viewers; nothing is asked of the run itself. Requests
are answered from what that thread has read last.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from hacrl.errors import ConfigError, HacrlError
from hacrl.report.page import ROLLOUTS, run_sampler, template
from hacrl.report.rollouts import encode
from hacrl.report.runs import RunData, find_runs, run_folders
from hacrl.report.summary import report_tables, summarise

HOST = "127.0.0.1"
POLL_SECONDS = 1.0
PING_SECONDS = 15.0  # an event that says nothing keeps the connection open
STEP_BYTES = 512 * 2**10  # of base64 for the rollouts of one step
READING_SECONDS = 2.0  # for rollouts, before the page is told about those that were read
KEPT_STEPS = 32  # whose rollouts stay in memory
WATCHED = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "timings.jsonl", "notes.txt", "status.json")
_State = tuple[Any, ...]  # names, sizes and times of files


class LiveRuns:
    """What the page shows of the runs in a folder, read again whenever a file has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[RunData] = []
        self._files: _State = ()
        self._index: dict[tuple[Path, int], tuple[_State, dict[str, Any]]] = {}
        self._chunks: OrderedDict[tuple[Path, int, _State], str] = OrderedDict()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self.version = 0  # grows when the page has to ask again
        self.summary = ""  # encoded
        self._read_files()
        self._publish()

    def poll(self) -> bool:
        """Read what has changed; return whether something had. A file that cannot be read yet is left."""
        try:
            has_new_lines = self._read_files()
            has_rollouts = self._read_rollouts()
        except (HacrlError, OSError):
            return False  # the run is being replaced, or wrote half of something: the next poll sees it whole
        if has_new_lines or has_rollouts:
            self._publish()
        return has_new_lines or has_rollouts

    def wait(self, version: int, seconds: float) -> int:
        """Return the version as soon as it is newer than ``version``, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > version, seconds)
            return self.version

    def rollouts(self, number: int, step: int) -> str | None:
        """Return a step's rollouts, encoded; None if there are none."""
        runs = self._runs
        if number >= len(runs):
            return None
        run = runs[number]
        state = _step_state(run.folder, step)
        if not state:
            return None
        with self._lock:
            key = (run.folder, step, state)
            if key not in self._chunks:
                self._chunks[key] = run_sampler(run).step(step, STEP_BYTES).encoded()
                while len(self._chunks) > KEPT_STEPS:
                    self._chunks.popitem(last=False)
            return self._chunks[key]

    def _read_files(self) -> bool:
        files = tuple(_state(folder / name) for folder in run_folders(self._folder) for name in WATCHED)
        if files == self._files and self._runs:
            return False
        self._runs = find_runs([self._folder])
        self._files = files
        return True

    def _read_rollouts(self) -> bool:
        """Count the rollouts of steps that are new, newest first, for a limited time."""
        end = time.monotonic() + READING_SECONDS
        has_changed = False
        for run in self._runs:
            sampler = run_sampler(run)
            steps = sampler.steps
            for folder, step in [key for key in self._index if key[0] == run.folder and key[1] not in steps]:
                del self._index[folder, step]
                has_changed = True
            for step in reversed(steps):
                state = _step_state(run.folder, step)
                if time.monotonic() > end or self._index.get((run.folder, step), (None,))[0] == state:
                    continue
                self._index[run.folder, step] = (state, sampler.step(step, STEP_BYTES).index())
                has_changed = True
        return has_changed

    def _publish(self) -> None:
        summary = summarise(self._runs, report_tables(self._runs), is_live=True)
        for run, data in zip(self._runs, summary["runs"], strict=True):
            known = sorted(
                (step, index) for (folder, step), (_, index) in self._index.items() if folder == run.folder
            )
            data["rollouts"] = [index for _, index in known]
        text = encode(summary)
        with self._changed:
            self.summary = text
            self.version += 1
            self._changed.notify_all()


def _state(path: Path) -> _State:
    try:
        status = path.stat()
    except OSError:
        return (str(path),)
    return str(path), status.st_size, status.st_mtime_ns


def _step_state(run: Path, step: int) -> _State:
    folder = run / ROLLOUTS / f"step-{step:06d}"
    return tuple(_state(path) for path in sorted(folder.rglob("*.jsonl")))


class _Handler(BaseHTTPRequestHandler):
    """Answers below the secret address only."""

    protocol_version = "HTTP/1.1"
    server: WatchServer

    def do_GET(self) -> None:
        """Answer with the page, its data, or events."""
        if not self._is_allowed():
            self._send(
                HTTPStatus.NOT_FOUND, "text/plain", b"not found: open the link that hacrl watch printed\n"
            )
            return
        place = self.path.split("/", 2)[2].split("?")[0]
        runs = self.server.runs
        if place == "":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", live_template().encode())
        elif place == "summary":
            self._send(HTTPStatus.OK, "text/plain", runs.summary.encode())
        elif place == "events":
            self._events(runs)
        else:
            self._rollouts(runs, place.split("/"))

    def _is_allowed(self) -> bool:
        """Return whether the address is the secret one, and was not reached by a name of another site."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        token = self.path.split("/", 2)[1] if self.path.count("/") > 1 else ""
        return host in (HOST, "localhost") and secrets.compare_digest(
            token.encode(errors="replace"), self.server.token.encode()
        )

    def _rollouts(self, runs: LiveRuns, parts: list[str]) -> None:
        found = None
        is_asked = (
            len(parts) == 3 and parts[0] == ROLLOUTS and all(p.isascii() and p.isdigit() for p in parts[1:])
        )
        if is_asked and max(map(len, parts[1:])) < 10:
            try:
                found = runs.rollouts(int(parts[1]), int(parts[2]))
            except (HacrlError, OSError) as error:
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())
                return
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"the log has no such step\n")
        else:
            self._send(HTTPStatus.OK, "text/plain", found.encode())

    def _events(self, runs: LiveRuns) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        version = 0  # a viewer who comes back is told at once
        while not self.server.is_closing:
            newest = runs.wait(version, PING_SECONDS)
            text = f"data: {newest}\n\n" if newest > version else ": still here\n\n"
            version = newest
            self.wfile.write(text.encode())
            self.wfile.flush()

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write nothing: the addresses are secret."""

    def handle(self) -> None:
        """Answer requests; a viewer may leave at any time."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True


class WatchServer(ThreadingHTTPServer):
    """The server and the thread that reads the run."""

    daemon_threads = True
    is_closing = False

    def __init__(self, folder: Path, port: int, poll_seconds: float = POLL_SECONDS) -> None:
        self.runs = LiveRuns(folder)
        self.token = secrets.token_urlsafe(18)
        self._poll_seconds = poll_seconds
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port {port} cannot be used: {error}; leave --port out for a free one"
            ) from error

    @property
    def link(self) -> str:
        """The page's address, which only its readers should know."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def poll_forever(self) -> None:
        """Read the run's files again and again until the server is closed."""
        while not self.is_closing:
            self.runs.poll()
            time.sleep(self._poll_seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve within the block."""
        threads = [
            threading.Thread(target=target, name=f"hacrl-watch-{target.__name__}", daemon=True)
            for target in cast(list[Callable[[], None]], [self.serve_forever, self.poll_forever])
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.is_closing = True
            self.shutdown()
            self.server_close()
            for thread in threads:
                thread.join()


def live_template() -> str:
    """Return the page without data, which may ask this server for them and nobody else."""
    return template().replace("connect-src 'none'", "connect-src 'self'", 1)


def watch(folder: Path, port: int, announce: Callable[[str], None]) -> None:
    """Serve the folder's page until Ctrl-C; give ``announce`` its address."""
    server = WatchServer(folder, port)
    os.nice(5)  # the run comes first
    with server.running():
        announce(server.link)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return
