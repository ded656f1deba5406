"""``hacrl eval`` with vLLM gives the answers of the transformers engine."""

from __future__ import annotations

import json
from pathlib import Path

from hacrl.config.schema import BenchmarkSettings
from hacrl.evaluation.plan import EvaluationRequest
from hacrl.evaluation.run import evaluate_targets
from hacrl.models.agent import Agent
from tests.support.engines import engine_agent
from tests.vllm.marks import IN_VLLM

pytestmark = IN_VLLM
PROBLEMS, NEW_TOKENS = 40, 12


def answers(folder: Path, model: Path, engine: str) -> dict[tuple[str, int], str]:
    """Evaluate greedily; return the texts by problem and sample."""
    settings = BenchmarkSettings(limit=PROBLEMS, samples=1, max_new_tokens=NEW_TOKENS, batch=16)
    request = EvaluationRequest(
        targets=(str(model),),
        on=("arithmetic",),
        settings=settings,
        engine=engine,
        device="cpu",
        output=folder,
    )
    results, written = evaluate_targets(request)
    assert len(results.pairs) == 1
    lines = [json.loads(line) for line in (written / "responses.jsonl").read_text().splitlines()]
    return {(line["problem"], line["sample"]): line["response"] for line in lines}


def test_greedy_answers_of_both_engines_are_equal(tmp_path: Path) -> None:
    """Float32 on a CPU: log-probabilities differ by rounding only, so greedy texts are the same."""
    model = tmp_path / "model"
    agent: Agent = engine_agent(leaning={"<eos>": 1.0})
    agent.save(model)
    plain = answers(tmp_path / "plain", model, "transformers")
    fast = answers(tmp_path / "fast", model, "vllm")
    assert len(plain) == PROBLEMS
    assert len(set(plain.values())) > 5
    assert fast == plain
