"""What ``hacrl eval`` tells the engine that it makes, and what it passes on from the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config.schema import AgentSettings, VllmSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.kind import TransformersKind
from hacrl.engines.kinds import EngineSpec
from hacrl.evaluation.plan import EvaluationRequest
from hacrl.evaluation.run import EvaluationObserver, evaluate_targets, with_free_memory
from hacrl.models.agent import Agent
from tests.support.tiny import byte_tokenizer, tiny_qwen

CONTEXT = 64  # tokens, which are bytes


class Kind(TransformersKind):
    """Records specs; has something to say about engines of its kind."""

    specs: list[EngineSpec] = []  # noqa: RUF012 - emptied by the fixture

    def make(self, spec: EngineSpec) -> TransformersEngine:
        self.specs.append(spec)
        return super().make(spec)

    def notes(self, agents: Any, devices: dict[str, torch.device]) -> tuple[str, ...]:
        return tuple(f"{agent.name} is slow on {devices[agent.name]}" for agent in agents)


@pytest.fixture
def model(tmp_path: Path) -> str:
    Kind.specs.clear()
    tokenizer = byte_tokenizer()
    Agent("tiny", tiny_qwen(tokenizer).eval(), tokenizer).save(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def evaluate(model: str, folder: Path, *prompts: str) -> list[str]:
    """Evaluate on these prompts; return the notes."""
    rows = [{"problem": prompt, "answer": "4", "id": str(n)} for n, prompt in enumerate(prompts)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    watch = EvaluationObserver()
    notes: list[str] = []
    watch.on_note = notes.append  # type: ignore[method-assign]
    request = EvaluationRequest(
        targets=(model,),
        on=(str(folder / "rows.jsonl"),),
        prompt="{problem}",
        engine=f"{__name__}:Kind",
        device="cpu",
        output=folder / "evaluation",
    )
    evaluate_targets(request, watch)
    return notes


def test_weight_updates_are_proven_with_prompts_that_fit(model: str, tmp_path: Path) -> None:
    evaluate(model, tmp_path, "2+2?" * 16, "2+2?", "2+2?" * 30, "1+1?" * 2)
    (spec,) = Kind.specs
    assert [len(prompt) for prompt in spec.probes] == [4, 8]  # of those that leave room for a response
    assert spec.max_length == CONTEXT


def test_notes_about_a_kind_of_engine_reach_the_user(model: str, tmp_path: Path) -> None:
    assert "tiny is slow on cpu" in evaluate(model, tmp_path, "2+2?")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(None, 0.69), ((0,), 0.69), ((1,), None)],  # 0.92 x 60 of 80 GB; nothing is known of another GPU
)
def test_an_engine_gets_what_is_free_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, devices: Any, expected: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    settings = AgentSettings(name="ada", model="m", vllm=VllmSettings(devices=devices))
    assert with_free_memory(settings, torch.device("cuda:0")).vllm.memory == expected
    assert with_free_memory(settings, torch.device("cpu")) is settings
    own = replace(settings, vllm=replace(settings.vllm, memory=0.3))
    assert with_free_memory(own, torch.device("cuda:0")) is own
