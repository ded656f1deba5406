"""Reward functions by name: modules, files, and what cannot be found there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.helpers import build, refusal, rollout_of

ROWS = [{"prompt": "What is 2+2?", "answer": "4"}]
EXAMPLES = "tests.tasks.reward_examples"


def rewards(task, *texts: str) -> list[float]:
    return [one.reward for one in task.verify([rollout_of(task.train[0], text) for text in texts])]


def test_functions_by_name(tmp_path: Path, monkeypatch):
    assert rewards(build("reward", functions=f"{EXAMPLES}:length", train=ROWS), "abc") == [3.0]
    assert rewards(build("reward", functions=[f"{EXAMPLES}:Matcher.same"], train=ROWS), "4", "5") == [
        1.0,
        0.0,
    ]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_rewards.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass R:\n    by: float\n"
        "    def __call__(self, completions, **kwargs):\n        return [self.by for _ in completions]\n\n"
        "twice = R(2)\n"
    )
    assert rewards(build("reward", functions=[f"{folder}/my_rewards.py:twice"], train=ROWS), "x") == [2.0]
    monkeypatch.chdir(folder)  # a module of the working folder, which a console script would not find
    assert rewards(build("reward", functions=["my_rewards:twice"], train=ROWS), "x") == [2.0]


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (f"{EXAMPLES}:lenth", f"'{EXAMPLES}:lenth': {EXAMPLES} has no 'lenth'; did you mean 'length'?"),
        (f"{EXAMPLES}:not_callable", f"'{EXAMPLES}:not_callable' is not callable; give a function"),
        (f"{EXAMPLES}:Matcher", f"'{EXAMPLES}:Matcher' is a class; give a function, or an instance of it"),
        (
            "no_such_module_x:f",
            "'no_such_module_x:f': no_such_module_x cannot be imported: ModuleNotFoundError: No mod",
        ),
        ("length", "'length' must be package.module:function or path/to/file.py:function"),
        (3, "'int' is not callable; give a function"),
    ],
)
def test_functions_that_cannot_be_found(reference, expected: str):
    assert refusal("reward", functions=[reference], train=ROWS).startswith(
        f"task.options.functions: {expected}"
    )


def test_a_file_that_is_missing_or_broken(tmp_path: Path):
    path = tmp_path / "r.py"
    assert (
        refusal("reward", functions=f"{path}:f", train=ROWS)
        == f"task.options.functions: {path} does not exist"
    )
    path.write_text("def f(:\n")
    message = refusal("reward", functions=f"{path}:f", train=ROWS)
    assert message.startswith(f"task.options.functions: '{path}:f': {path} cannot be imported: SyntaxError: ")


def test_torch_and_numpy_numbers_are_numbers():
    import numpy as np
    import torch

    assert rewards(
        build("reward", train=ROWS, functions=lambda completions, **_: torch.tensor([0.5, 1.5])), "a", "b"
    ) == [0.5, 1.5]
    assert rewards(
        build("reward", train=ROWS, functions=lambda completions, **_: np.array([0.5, 2.0])), "a", "b"
    ) == [0.5, 2.0]
    assert rewards(
        build("reward", train=ROWS, functions=lambda completions, **_: (torch.tensor(0.5), np.float32(2))),
        "a",
        "b",
    ) == [
        0.5,
        2.0,
    ]
