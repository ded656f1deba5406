"""The live page: served on loopback, behind a secret address, kept up to date, to several viewers."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hacrl.errors import ConfigError
from hacrl.report.watch import LiveRuns, WatchServer
from tests.support.report_runs import MadeUpRun

RUN = MadeUpRun(agents=("ada", "bob"), steps=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return RUN.write(tmp_path / "run", until=2)


@pytest.fixture
def server(folder: Path) -> Iterator[WatchServer]:
    server = WatchServer(folder, 0, poll_seconds=0.02)
    with server.running():
        yield server


def get(server: WatchServer, path: str, host: str | None = None) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.getheader("Content-Type") or "", answer.read().decode()
    connection.close()
    return found


def decoded(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def events(server: WatchServer) -> Iterator[int]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", f"/{server.token}/events")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    while line := answer.readline():
        if line.startswith(b"data:"):
            yield int(line.split()[1])
    connection.close()


def steps_after(server: WatchServer, viewer: Iterator[int], wanted: int) -> None:
    """Follow the events until the page has so many steps and the counts of their rollouts."""
    for _ in viewer:
        run = decoded(get(server, f"/{server.token}/summary")[2])["runs"][0]
        if len(run["steps"]) == wanted == len(run["rollouts"]):
            return


def test_only_the_printed_address_shows_anything(server: WatchServer):
    assert server.link == f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"
    status, kind, page = get(server, f"/{server.token}/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "connect-src 'self'" in page
    for path in ("/", "/summary", "//summary", f"/{server.token[:-1]}/summary", f"/{server.token}", "/%00/"):
        assert get(server, path)[0] == 404, path
    for path in (
        "x",
        "rollouts/0",
        "rollouts/0/99",
        "rollouts/7/1",
        "rollouts/0/../1",
        f"rollouts/0/{10**20}",
    ):
        assert get(server, f"/{server.token}/{path}")[0] == 404, path
    # another site's name that resolves to this machine
    assert get(server, f"/{server.token}/summary", host="evil.example:80")[0] == 404


def test_several_viewers_see_new_steps_and_a_restart(server: WatchServer, folder: Path):
    viewers = [events(server), events(server)]
    for viewer in viewers:
        steps_after(server, viewer, 2)
    RUN.write(folder, until=4)
    for viewer in viewers:
        steps_after(server, viewer, 4)
    shutil.rmtree(folder)  # as --overwrite does
    RUN.write(folder, until=1)
    for viewer in viewers:
        steps_after(server, viewer, 1)
    assert decoded(get(server, f"/{server.token}/rollouts/0/1")[2])["step"] == 1
    assert get(server, f"/{server.token}/rollouts/0/4")[0] == 404


def test_nothing_is_read_again_while_nothing_changes(folder: Path):
    runs = LiveRuns(folder)
    assert runs.poll()  # counts the rollouts
    version = runs.version
    assert [runs.poll() for _ in range(3)] == [False, False, False]
    assert runs.version == version


def test_a_file_that_is_half_written_changes_nothing(folder: Path):
    runs = LiveRuns(folder)
    runs.poll()
    before = runs.summary
    (folder / "config.yaml").write_text("agents: [")
    assert not runs.poll()
    assert runs.summary == before
    RUN.write(folder, until=3)
    assert runs.poll()
    assert len(decoded(runs.summary)["runs"][0]["steps"]) == 3


def test_a_port_in_use_is_named(server: WatchServer, folder: Path):
    with pytest.raises(ConfigError, match="cannot be used"):
        WatchServer(folder, server.server_address[1])


def test_watching_writes_nothing(folder: Path):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    runs = LiveRuns(folder)
    runs.poll()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
