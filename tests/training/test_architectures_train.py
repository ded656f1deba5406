"""Every architecture in two real steps; hybrids also resume exactly and learn their stop token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AgentSettings,
    CheckpointSettings,
    EvaluationSettings,
    GspoSettings,
    LearningSettings,
)
from hacrl.models.agent import Agent
from hacrl.models.architecture import architecture_support
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.learner import Learner
from hacrl.training.observer import Observer, Phase
from hacrl.types import LearnerSample, Sampling
from tests.support.architectures import (
    ARCHITECTURES,
    TOKENIZER,
    UNEXPECTED,
    is_known,
    save_tiny,
    sevens_task,
    tiny_config,
    tiny_model,
    two_agents,
    two_steps,
)
from tests.support.chaos import differing_files
from tests.support.forward import plain_logprobs
from tests.support.tiny import char_agent

PAGE = Path(__file__).parents[2] / "docs" / "supported_models.md"
# the hybrids that people ask for, and one of each other kind
QUICK = ["falcon_h1", "gemma2", "jamba", "lfm2", "llama", "mamba2", "qwen3_5", "qwen3_next", "t5", "xlnet"]


def table() -> dict[str, tuple[str, str]]:
    """Return the page's table: model_type -> result and why."""
    rows = re.findall(r"^\| `(.*?)` \|.*?\| (\w+) \|.*?\| ?(.*?) ?\|$", PAGE.read_text(), re.MULTILINE)
    return {name: (path, reason) for name, path, reason in rows if name != "model_type"}


def test_the_table_has_every_architecture() -> None:
    assert sorted(table()) == sorted(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 90
    assert f"with transformers {transformers.__version__}" in PAGE.read_text().replace("\n", " ")


def check_row(name: str) -> None:
    path, reason = table()[name]
    support = architecture_support(tiny_config(name))
    if reason == UNEXPECTED:
        assert (support.path, path) == ("packed", "plain")
    else:
        assert (support.path, support.reason) == (path, reason)


def check_training(name: str, folder: Path) -> None:
    found = two_steps(name, folder)
    assert (found.path, found.reason) == table()[name]
    if found.path != "refused":
        assert found.largest_gap < 1e-4
        assert found.moved > 1e-3  # the learning rate


@pytest.mark.parametrize("name", [name for name in QUICK if is_known(name)])
def test_two_steps_show_what_the_table_says(name: str, tmp_path: Path) -> None:
    check_row(name)
    check_training(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if is_known(name) and name not in QUICK])
def test_two_steps_with_every_architecture(name: str, tmp_path: Path) -> None:
    check_row(name)
    check_training(name, tmp_path)


class _Interrupter(Observer):
    """Interrupts its run when a phase of a step begins for the agent "tiny"."""

    run: LocalRun | None = None

    def __init__(self, step: int, phase: str) -> None:
        self._at = (step, phase)

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if (step, phase) == self._at and agent == "tiny" and self.run is not None:
            self.run.interrupt()


@pytest.mark.parametrize(
    ("name", "phase"), [("qwen3_5_text", "rollout"), ("mamba2", "learn"), ("lfm2", "learn")]
)
def test_a_resumed_run_of_a_hybrid_ends_like_an_uninterrupted_one(
    name: str, phase: str, tmp_path: Path
) -> None:
    settings = AgentSettings(name="tiny", model=str(save_tiny(name, tmp_path / "start")))
    char_agent("partner", seed=1).save(tmp_path / "partner")
    changes = {
        "checkpoint": CheckpointSettings(every=1, background=False),
        "evaluation": EvaluationSettings(problems=2, every=1),
    }
    with sevens_task():
        calm = two_agents(settings, tmp_path, output=str(tmp_path / "calm"), **changes)
        run_locally(calm)
        watch = _Interrupter(2, phase)
        stopped = two_agents(settings, tmp_path, output=str(tmp_path / "stopped"), **changes)
        with LocalRun(stopped, [watch]) as watch.run:
            watch.run.train()
            watch.run.save()
        assert watch.run.is_interrupted
        found = inspect_run(tmp_path / "stopped")
        with LocalRun(found.config, resumed=found.point) as again:
            again.train()
            again.save()
    assert differing_files(tmp_path / "calm", tmp_path / "stopped") == []


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2", "lfm2", "jamba", "falcon_h1"])
def test_the_stop_token_is_learnt(name: str) -> None:
    agent = Agent("tiny", tiny_model(name), TOKENIZER)
    stop = TOKENIZER.eos_token_id
    prompt, response = (4, 5, 6), (7, 8, stop)

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return plain_logprobs(agent.model, prompt, response, Sampling(8))

    before = logprobs()
    learner = Learner(agent, make_method(GspoSettings()), LearningSettings(lr=1e-3), Sampling(8))
    sample = LearnerSample(
        prompt, response, tuple(before.tolist()), float(before.sum()), len(response), "tiny", True, 1.0
    )
    learner.learn([sample], updates=1, seed=0)
    assert logprobs()[-1] > before[-1] + 1e-3
