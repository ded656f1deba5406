"""Exit codes, on which scripts rely."""

from __future__ import annotations

import signal

import pytest

from hacrl import errors
from hacrl.cli import exit_codes


def test_the_codes_agree_with_the_documentation() -> None:
    assert (exit_codes.FINISHED, exit_codes.FAILED, exit_codes.BAD_INPUT) == (0, 1, 2)
    assert exit_codes.stopped_by(signal.SIGINT) == 130
    assert exit_codes.stopped_by(signal.SIGTERM) == 143


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("lr: must be positive"), 2),
        (errors.ModelError("no such model"), 2),
        (errors.TaskError("data.jsonl is empty"), 2),
        (errors.TrainingError("the loss is not finite"), 1),
        (errors.CheckpointError("the disk is full"), 1),
        (RuntimeError("a bug"), 1),
        (ValueError("a bug too: nobody checked it"), 1),
    ],
)
def test_bad_input_and_failure_have_different_codes(error: Exception, code: int) -> None:
    assert exit_codes.of_error(error) == code
