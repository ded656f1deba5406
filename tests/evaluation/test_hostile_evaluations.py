"""Going on with an evaluation in a folder that is damaged, or made to do harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hacrl.errors import ConfigError, HacrlError
from hacrl.evaluation.chunks import plan_chunks
from hacrl.evaluation.folder import EvaluationFolder, PairRecord
from hacrl.evaluation.results import ScoredResponse

RECORD = PairRecord(
    agent="ada",
    benchmark="sums",
    model="m",
    weights="",
    problem_count=4,
    problems="",
    samples=2,
    temperature=1.0,
    top_p=1.0,
    stop="[]",
    max_new_tokens=8,
    seed=0,
    batch=4,
    engine="transformers",
    device="cpu",
    precision="float32",
    chat_template=False,
    chat_template_args="{}",
)
PLAN = plan_chunks([3, 3, 3, 3], None, 8, samples=2, batch=4)  # two chunks of two problems
RESPONSES = [
    ScoredResponse(f"p{position}", sample, 0.5, "scored", 3, "stop")
    for chunk in PLAN.chunks
    for position, sample in chunk.slots
]

SLOTS = [(response.problem, response.sample) for response in RESPONSES]


def change_lines(path: Path, change: Callable[[list[dict]], list[dict]]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))


def written(path: Path) -> EvaluationFolder:
    """An evaluation with all eight responses."""
    folder = opened(path)
    folder.append(RECORD.key, RESPONSES[:4], ["a\u2028", "b", "\ud800", "d"])
    folder.append(RECORD.key, RESPONSES[4:], ["e", "f", "g", "h"])
    folder.write_results({"x": 1}, "# x\n")
    return folder


def opened(path: Path) -> EvaluationFolder:
    folder = EvaluationFolder(path)
    folder.check([RECORD], overwrite=False)
    folder.open([RECORD], {RECORD.key: PLAN})
    return folder


def test_whole_chunks_are_kept_to_the_byte(tmp_path):
    written(tmp_path / "e")
    path = tmp_path / "e" / "responses.jsonl"
    content = path.read_bytes()
    assert opened(tmp_path / "e").responses(RECORD.key) == RESPONSES
    assert path.read_bytes() == content
    lines = content.splitlines(keepends=True)
    assert len(lines) == 8
    for kept in range(8):  # 3 whole lines are no whole chunk, 6 are one
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
        assert opened(tmp_path / "e").responses(RECORD.key) == RESPONSES[: kept // 4 * 4]
        assert path.read_bytes() == b"".join(lines[: kept // 4 * 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:1] + lines[2:], "responses of ada on sums are missing in the middle"),
        (lambda lines: lines[:1] + lines, "responses of ada on sums are missing in the middle"),
        (lambda lines: [{**lines[0], "problem": "p9"}, *lines[1:]], "are missing in the middle"),
        (
            lambda lines: [{**lines[0], "agent": "eve"}, *lines[1:]],
            "line 1, is damaged: its pair is not in plan.json",
        ),
        (
            lambda lines: [{**lines[0], "agent": []}, *lines[1:]],
            "line 1, is damaged: its pair is not in plan.json",
        ),
        (
            lambda lines: [{**lines[0], "reward": "1"}, *lines[1:]],
            "line 1, is damaged or of .* version: reward",
        ),
        (
            lambda lines: [{**lines[0], "reward": True}, *lines[1:]],
            "line 1, is damaged or of .* version: reward",
        ),
        (
            lambda lines: [{**lines[0], "tokens": 1.5}, *lines[1:]],
            "line 1, is damaged or of .* version: tokens",
        ),
        (lambda lines: [{**lines[0], "verdict": "fine"}, *lines[1:]], "line 1, .* verdict or finish_reason"),
        (lambda lines: [{}, *lines], "line 1, is damaged: its pair is not in plan.json"),
    ],
)
def test_an_evaluation_does_not_continue_from_damaged_responses(change, message, tmp_path):
    written(tmp_path / "e")
    path = tmp_path / "e" / "responses.jsonl"
    change_lines(path, change)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"responses\.jsonl.*{message}.*; use --overwrite to start again"):
        opened(tmp_path / "e")
    assert path.read_bytes() == before
    folder = EvaluationFolder(tmp_path / "e")
    folder.check([RECORD], overwrite=True)
    folder.open([RECORD], {RECORD.key: PLAN}, overwrite=True)
    assert folder.responses(RECORD.key) == []


@pytest.mark.parametrize("name", ["plan.unfinished", "responses.jsonl", "responses.unfinished", "results.md"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_an_evaluation_writes_to_no_link_and_no_pipe(name, kind, tmp_path):
    written(tmp_path / "e")
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "e" / name).unlink(missing_ok=True)
    if kind == "link":
        (tmp_path / "e" / name).symlink_to(tmp_path / "mine.txt")
    else:
        os.mkfifo(tmp_path / "e" / name)
    words = rf"{name} (leads out of|is a pipe)"
    with pytest.raises(ConfigError, match=words):
        written(tmp_path / "e")
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[", "no readable plan.json .*not valid JSON"),
        (b"\xff", "no readable plan.json .*not UTF-8"),
        (b"3", "no readable plan.json"),
        (b"[3]", "no readable plan.json"),
        (b'[{"agent": "ada"}]', "no readable plan.json"),
        (b'[{"agent": [], "benchmark": {}}]', r"\[\] on \{\}, which this command does not request"),
        (b'[{"agent": "ada", "benchmark": "sums"}]', "model None, not m"),
    ],
)
def test_a_foreign_plan_is_refused(content, words, tmp_path):
    written(tmp_path / "e")
    (tmp_path / "e" / "plan.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"holds an evaluation with {words}.*--overwrite to replace it"):
        opened(tmp_path / "e")


def test_an_output_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "dangling", "pipe", "x" * 300, "file/below"):
        with pytest.raises(ConfigError, match="--output: cannot "):
            opened(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@settings(
    derandomize=True, deadline=None, max_examples=100, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_any_damage_to_responses_is_one_message(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("e")
    written(path)
    content = (path / "responses.jsonl").read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = min(len(content), start + data.draw(st.integers(0, 200)))
    new = data.draw(st.binary(max_size=6) | st.sampled_from([b"null", b"1e999", b"[]", b"{}", b"\n", b'"x"']))
    (path / "responses.jsonl").write_bytes(content[:start] + new + content[end:])
    try:
        responses = opened(path).responses(RECORD.key)
    except HacrlError as error:
        message = str(error)
    else:
        assert [(response.problem, response.sample) for response in responses] == SLOTS[: len(responses)]
        return
    assert message.startswith(str(path / "responses.jsonl"))
    assert message.endswith("use --overwrite to start again")
