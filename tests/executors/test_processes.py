"""Workers in processes of their own give the same run as workers in this process, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.errors import ConfigError
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from tests.support.chaos import chaos_config, differing_files

ELSEWHERE = "tests.support.process_executor:make"


def test_a_run_with_workers_in_other_processes_is_the_same(tmp_path: Path) -> None:
    here = chaos_config(tmp_path / "here", 2)
    there = replace(chaos_config(tmp_path / "there", 2), executor=ELSEWHERE)
    assert len(here.agents) >= 2
    run_locally(here)
    run_locally(there)
    assert (tmp_path / "here" / "metrics.jsonl").read_text().count("\n") == 2
    assert differing_files(tmp_path / "here", tmp_path / "there") == []


def test_a_run_can_change_its_executor_when_it_is_resumed(tmp_path: Path) -> None:
    for name, executor in (("here", "local"), ("moved", ELSEWHERE)):
        run_locally(replace(chaos_config(tmp_path / name, 1), executor=executor))
        found = inspect_run(tmp_path / name, ["steps=3", "executor=local"])
        with LocalRun(found.config, resumed=found.point) as run:
            run.train()
            run.save()
    assert differing_files(tmp_path / "here", tmp_path / "moved") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("locl", "executor: there is no executor 'locl'; did you mean 'local'"),
        ("tests.support.process_executor:mak", "has no 'mak'; did you mean 'make'"),
        ("tests.support.process_executor:ELSE", "has no 'ELSE'"),
        ("no.such.module:make", "no.such.module cannot be imported"),
    ],
)
def test_an_executor_that_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_locally(replace(chaos_config(tmp_path / "run", 1), executor=name))
    assert not (tmp_path / "run").exists()
