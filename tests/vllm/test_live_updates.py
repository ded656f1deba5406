"""A vLLM server gets new weights in the middle of responses, and says which weights sampled which tokens."""

from __future__ import annotations

import copy
import re
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.types import Sampling
from tests.support.engines import change_weights, engine_agent, probe_prompts
from tests.support.live_updates import cached_logprobs
from tests.vllm.conftest import Server

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(300, temperature=0.9)


def sampled_tokens(server: Server) -> float:
    """Return how many tokens the server has sampled since its start."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return float(re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]


def in_generation(
    server: Server, engine: VllmEngine, request: GenerationRequest, act: Callable[[], Any]
) -> list[Sample]:
    """Return the samples of a generation, in the middle of which ``act`` is called in this thread."""
    found: list[list[Sample]] = []
    start = sampled_tokens(server)
    thread = threading.Thread(target=lambda: found.append(engine.generate(request)))
    thread.start()
    while sampled_tokens(server) < start + 5 * request.num_samples:
        assert thread.is_alive()
    act()
    thread.join(600)
    return found[0]


@pytest.mark.parametrize("way", ["files", "gloo"])
def test_tokens_say_which_weights_sampled_them(server: Server, way: str) -> None:
    agent = engine_agent(seed=3)
    engine = server.engine(agent, weight_sync=way)
    engine.follows_policy = False
    assert engine.updates_while_generating
    models: dict[int, Any] = {}
    reports = []

    def publish() -> None:
        change_weights(agent, seed=agent.policy_version, size=0.05)
        models[agent.policy_version] = copy.deepcopy(agent.model)
        reports.append(engine.sync())

    publish()
    prompts = probe_prompts(agent)
    request = GenerationRequest(prompts, 2, SAMPLING, frozenset(), seed=3)
    samples = in_generation(server, engine, request, publish)
    assert [report.policy_version for report in reports] == [1, 2]
    assert max(report.logprob_gap for report in reports) < 1e-4
    assert [[version for version, _ in sample.versions] for sample in samples] == [[1, 2]] * 10
    for number, sample in enumerate(samples):
        assert len(sample.token_ids) == 300
        expected = cached_logprobs(models, prompts[number // 2], sample, SAMPLING)
        assert sample.logprobs == pytest.approx(expected, abs=1e-3)
        only_new = cached_logprobs({1: models[2], 2: models[2]}, prompts[number // 2], sample, SAMPLING)
        assert sample.logprobs != pytest.approx(only_new, abs=0.1)

    # Prompts whose keys and values the server still has from the old weights are computed anew.
    after = engine.generate(request)
    assert {sample.versions for sample in after} == {((2, 300),)}
    for number, sample in enumerate(after):
        expected = cached_logprobs(models, prompts[number // 2], sample, SAMPLING)
        assert sample.logprobs == pytest.approx(expected, abs=1e-3)


def test_after_asynchronous_generations_a_synchronous_one_uses_no_old_keys(server: Server) -> None:
    agent = engine_agent(seed=4)
    engine = server.engine(agent)
    request = GenerationRequest(probe_prompts(agent), 2, Sampling(8), frozenset(), seed=3)
    engine.generate(request)  # leaves keys and values of version 0
    engine.follows_policy = False
    change_weights(agent, seed=1)
    engine.sync()
    engine.follows_policy = True
    for number, sample in enumerate(engine.generate(request)):
        labelled = Sample(sample.token_ids, sample.logprobs, ((1, 8),))
        expected = cached_logprobs({1: agent.model}, request.prompts[number // 2], labelled, Sampling(8))
        assert sample.logprobs == pytest.approx(expected, abs=1e-3)


def test_stop_strings_end_labelled_responses(server: Server) -> None:
    agent = engine_agent(seed=5)
    engine = server.engine(agent)
    engine.follows_policy = False
    engine.sync()
    sampling = Sampling(60, stop=("7",))
    request = GenerationRequest(probe_prompts(agent), 4, sampling, frozenset(), seed=3)
    samples = engine.generate(request)
    texts = [agent.tokenizer.decode(sample.token_ids) for sample in samples]
    assert sum(text.endswith("7") for text in texts) >= 3
    for text, sample in zip(texts, samples, strict=True):
        assert "7" not in text[:-1]
        assert text.endswith("7") or len(sample.token_ids) == 60
        assert sample.versions == ((0, len(sample.token_ids)),)
