"""An engine whose responses do not match its agent's policy ends the run, which can be resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hacrl.cli.main import main
from hacrl.engines.base import GenerationRequest, OnFinished, Sample
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.runs.run import run_locally
from tests.support.chaos import chaos_config, differing_files

STEPS = 3
LIE = 6.0  # nats, for all tokens but the first


def lying_from(policy_version: int):
    """Generate as the engine does, but with wrong log-probabilities for the second agent after its update."""
    honestly = TransformersEngine.generate

    def generate(
        engine: TransformersEngine, request: GenerationRequest, on_finished: OnFinished
    ) -> list[Sample]:
        if engine.policy.name != "llama" or engine.policy.policy_version < policy_version:
            return honestly(engine, request, on_finished)

        def lie(sample: Sample) -> Sample:
            first, *others = sample.logprobs
            return Sample(sample.token_ids, (first, *(logprob - LIE for logprob in others)))

        def finished(samples: Sequence[tuple[int, Sample]]) -> None:
            on_finished([(index, lie(sample)) for index, sample in samples])

        return [lie(sample) for sample in honestly(engine, request, finished)]

    return generate


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run a command in this process and return its exit code."""
    monkeypatch.setattr("sys.argv", ["hacrl", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_run_ends_with_a_message_and_resumes_with_a_correct_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calm, folder = tmp_path / "calm", tmp_path / "run"
    run_locally(chaos_config(calm, STEPS))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((calm / "config.yaml").read_text())
    with monkeypatch.context() as lies:
        lies.setattr(TransformersEngine, "generate", lying_from(policy_version=4))  # after step 1
        assert command(lies, "train", str(recipe), f"output={folder}") == 1
    said = capsys.readouterr()
    (error,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert "agent 'llama': its own responses of this step do not come from its policy" in error
    assert "(at most 6," in error
    assert "allowed are 0.15" in error
    assert "Traceback" not in said.out + said.err
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["steps_done"]) == ("failed", 1)
    assert [one.name for one in (folder / "checkpoints").iterdir()] == ["step-000001"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    # the other agent has learnt from these responses in the step that failed: that is gone as well
    assert command(monkeypatch, "resume", str(folder)) == 0
    assert differing_files(calm, folder) == []


def test_a_raised_limit_accepts_the_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersEngine, "generate", lying_from(policy_version=0))
    config = chaos_config(tmp_path / "run", 1, agent_defaults={"vllm": {"max_logprob_gap": 7.0}})
    run_locally(config)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert 3.0 < json.loads(line)["agents"]["llama"]["learning"]["sampler_gap"] < 6.0
