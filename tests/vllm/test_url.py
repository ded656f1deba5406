"""A server that somebody else started: the right key, and what a wrong one leads to, before models load."""

from __future__ import annotations

from pathlib import Path

import pytest

from hacrl.config.schema import AgentSettings, RunConfig, VllmSettings
from hacrl.engines.registry import check_engines
from hacrl.errors import ConfigError, ModelError
from hacrl.models.agent import Agent
from hacrl.runs.run import run_locally
from hacrl.types import Problem, Sampling
from tests.support.engines import CONTEXT, engine_agent, sample_rollouts
from tests.vllm.conftest import Server

pytestmark = pytest.mark.vllm


def config(tmp_path: Path, settings: VllmSettings) -> RunConfig:
    agent = AgentSettings(name="ada", model="bundled:qwen-small-a", engine="vllm", vllm=settings)
    return RunConfig(agents=(agent,), output=str(tmp_path / "run"), device="cpu")


def test_a_server_with_our_key_passes(server: Server, tmp_path: Path) -> None:
    check_engines(config(tmp_path, server.settings()))


@pytest.mark.parametrize("key", [None, "another key"])
def test_a_wrong_key_is_found_before_models_load(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key is None:
        monkeypatch.delenv("HACRL_VLLM_API_KEY")
    else:
        monkeypatch.setenv("HACRL_VLLM_API_KEY", key)
    monkeypatch.setattr(Agent, "load", lambda *_: pytest.fail("a model was loaded"))
    message = rf"agents\.ada\.vllm\.url: .*{server.url} refuses the API key.*HACRL_VLLM_API_KEY"
    with pytest.raises(ConfigError, match=message):
        run_locally(config(tmp_path, server.settings()))
    assert not (tmp_path / "run").exists()


def test_the_key_is_written_nowhere(server: Server) -> None:
    assert server.key not in server.log.read_text()
    assert server.key not in str(server.settings())


def test_a_response_that_might_not_fit_is_refused_and_not_cut(server: Server) -> None:
    problem = Problem("long", "1" * (CONTEXT - 20), "7")
    engine = server.engine(engine_agent(leaning={"<eos>": -100.0}))
    assert [r.num_tokens for r in sample_rollouts(engine, [problem], 1, Sampling(20), 0)] == [20]
    message = rf"agent 'ada': prompt 1 of 1 .* max_new_tokens=21 it needs {CONTEXT + 1}, .* {CONTEXT}: "
    with pytest.raises(ModelError, match=message):
        sample_rollouts(engine, [problem], 1, Sampling(21), 0)


def test_a_server_goes_on_after_a_caller_stopped(server: Server) -> None:
    """Requests under way are taken back; the next ones are answered."""

    def stop(place: int, rollout: object) -> None:
        raise KeyboardInterrupt

    agent = engine_agent(leaning={"<eos>": -100.0})
    engine = server.engine(agent)
    problems = [Problem("1", "1:", "7"), Problem("2", "2:", "7")]
    with pytest.raises(KeyboardInterrupt):
        sample_rollouts(engine, problems, 40, Sampling(100), 0, stop)
    assert [r.num_tokens for r in sample_rollouts(engine, problems, 1, Sampling(3), 0)] == [3, 3]
