"""Episodes under ``executor: ray``: every process has its own environments, and the files are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hacrl.runs.run import run_locally
from tests.support.chaos import differing_files
from tests.support.episode_runs import episode_config
from tests.support.ray_cluster import connected


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def test_a_run_of_episodes_is_that_of_the_local_executor(tmp_path: Path) -> None:
    run_locally(episode_config(tmp_path, "local", 2))
    run_locally(episode_config(tmp_path, "ray", 2, executor="ray"))
    assert len((tmp_path / "ray" / "metrics.jsonl").read_text().splitlines()) == 2
    assert differing_files(tmp_path / "local", tmp_path / "ray") == []
