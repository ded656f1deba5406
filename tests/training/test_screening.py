"""Screening leaves out backward passes without a gradient, and changes nothing else.

"Equal" means: losses, ratios, clipped shares, KL and the gradients of log-probabilities are equal to the bit
where the micro-batches are the same. The gradients of weights are then equal up to the order of additions,
and to the bit where each response has a micro-batch of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AgentSettings,
    AlignedSettings,
    AnyMethodSettings,
    FtisSettings,
    GrpoSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
    LoraSettings,
    NaiveSettings,
    PluginMethodSettings,
    SapoSettings,
    SuccessGatedSettings,
)
from hacrl.models import logprobs
from hacrl.models.agent import Agent
from hacrl.models.packing_support import supports_packing
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.training.learn_stats import LearnStats, SourceStats
from hacrl.training.learner import Learner
from hacrl.training.screening import ScreeningPolicy, forward_share
from hacrl.types import LearnerSample, LossBatch, LossTerms
from tests.support.ranks import run_ranks
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, gradients, largest_difference, sample, weights

UNCLIPPED = 1e9  # a gradient norm that is never reached
WIDE = {"clip_low": 0.2, "clip_high": 0.28}


class Squared:
    """A method of a user's own: no ratio, and no gradient of responses more likely than e^-9."""

    shares_rollouts = True

    def advantages(self, rewards, learner, capability_ratio):
        return {source: [1.0] * len(values) for source, values in rewards.items()}

    def loss(self, batch: LossBatch) -> LossTerms:
        logprob_B = batch.logprobs_BT.masked_fill(~batch.mask_BT, 0.0).sum(dim=-1)
        nothing_B = torch.zeros_like(logprob_B.detach())
        return LossTerms(
            (logprob_B + 9.0).clamp(max=0.0).square() * batch.advantages_B.abs(),
            logprob_B.detach().exp(),
            nothing_B,
            nothing_B,
            nothing_B + 1.0,
            nothing_B,
        )


METHODS: dict[str, AnyMethodSettings] = {
    "grpo": GrpoSettings(**WIDE),
    "grpo-token": GrpoSettings(**WIDE, aggregation="token"),
    "gspo": GspoSettings(**WIDE),
    "naive": NaiveSettings(**WIDE),
    "hacpo": HacpoSettings(**WIDE, delta=0.2, delta_step=0.025),
    "hacpo-kl": HacpoSettings(**WIDE, delta=0.2, delta_step=0.025, kl_coefficient=0.05),
    "success_gated": SuccessGatedSettings(**WIDE),
    "ftis": FtisSettings(**WIDE, filter_kl=0.5),
    "sapo": SapoSettings(**WIDE),
    "aligned": AlignedSettings(**WIDE),
    "own": PluginMethodSettings(name=f"{__name__}:Squared"),
}


def fresh(**changes: Any) -> Agent:
    agent = sharpened(char_agent(**changes), 10.0)
    assert supports_packing(agent.model)  # found out now, so that its passes are not counted below
    return agent


def given(agent: Agent) -> list[LearnerSample]:
    """Own and others' responses: in the clip ranges, clipped on both sides, retokenised, without signal."""
    return [
        sample(agent, 0, ratio=1.0, advantage=1.0),
        sample(agent, 1, ratio=1.6, advantage=2.0),  # clipped above
        sample(agent, 2, ratio=0.5, advantage=-1.0),  # clipped below
        sample(agent, 3, ratio=1.05, advantage=-1.5),
        sample(agent, 5, ratio=1.0, advantage=0.0),
        sample(agent, 0, ratio=0.9, advantage=1.0, own=False),
        sample(agent, 1, ratio=0.5, advantage=1.0, own=False),
        sample(agent, 3, ratio=1.4, advantage=0.5, own=False, retokenised=True),
        sample(agent, 4, ratio=0.3, advantage=-2.0, own=False),
        replace(sample(agent, 5, ratio=0.95, advantage=-0.7, own=False), source="third"),
        replace(sample(agent, 2, ratio=2.0, advantage=1.0, own=False), source="third"),
    ]


def learner(agent: Agent, method: AnyMethodSettings, mode: str, **settings: Any) -> Learner:
    exact = settings.pop("exact", True)
    learning = {"lr": 1e-2, "max_grad_norm": UNCLIPPED, "compile": False, "skip_zero_gradient": mode}
    return Learner(
        agent,
        make_method(method),
        LearningSettings(**{**learning, **settings}),
        SAMPLING,
        exact_sampler=exact,
    )


@contextmanager
def passes(agent: Agent) -> Iterator[dict[str, int]]:
    """Count passes through the decoder: with gradients and without."""
    counted = {"forward and backward": 0, "forward": 0}

    def count(*_: Any) -> None:
        counted["forward and backward" if torch.is_grad_enabled() else "forward"] += 1

    hook = agent.model.model.register_forward_hook(count)
    try:
        yield counted
    finally:
        hook.remove()


def numbers(stats: LearnStats) -> dict[str, Any]:
    """Return all statistics in an order that does not depend on micro-batches, without the counts of work."""
    sources = {
        source: {key: sorted(value) for key, value in asdict(found).items() if isinstance(value, list)}
        for source, found in stats.sources.items()
    }
    own = {key: sorted(value) for key, value in asdict(stats.own).items()}
    firsts = {key: (use.numbers, use.token_logprobs) for key, use in stats.first_uses.items()}
    return {"sources": sources, "own": own, "firsts": firsts, "gaps": sorted(stats.sampler_differences)}


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("exact", [True, False], ids=["sampler", "learner"])
def test_alone_in_their_micro_batches_responses_give_the_same_bits(name: str, exact: bool) -> None:
    """Three updates: numbers, gradients and weights. A response without a gradient adds exact zeros."""
    method, settings = METHODS[name], {"micro_batch_tokens": 1, "exact": exact, "measure_alignment": False}
    plain, screened = fresh(), fresh()
    expected = learner(plain, method, "never", **settings).learn(given(plain), updates=3, seed=1)
    found = learner(screened, method, "always", **settings).learn(given(screened), updates=3, seed=1)
    assert numbers(found) == numbers(expected)
    assert found.losses == pytest.approx(expected.losses, abs=1e-7)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    assert (expected.screened, expected.screened_out) == (0, 0)
    zeros = sum(value == 0 for source in found.sources.values() for value in source.gradients)
    assert found.screened == sum(len(source.gradients) for source in found.sources.values())
    assert found.screened_out == zeros > 0
    assert largest_difference(weights(screened), weights(plain)) < 1e-6


def test_the_order_of_micro_batches_decides_over_the_last_bits() -> None:
    """One update over one source: the same passes in the same order, so gradients and weights are equal."""
    plain, screened = fresh(), fresh()
    samples = [one for one in given(plain) if one.source == "other"]
    method = METHODS["hacpo"]
    expected = learner(plain, method, "never", micro_batch_tokens=1).learn(samples, updates=1, seed=0)
    found = learner(screened, method, "always", micro_batch_tokens=1).learn(samples, updates=1, seed=0)
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    assert (found.screened, found.screened_out) == (4, 3)
    assert_equal(gradients(screened), gradients(plain))
    assert largest_difference(weights(screened), weights(plain)) == 0.0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_in_shared_micro_batches_are_equal_up_to_rounding(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packed:
        monkeypatch.setattr(logprobs, "has_fused_attention", lambda model: True)
        monkeypatch.setattr(logprobs, "has_tree_attention", lambda model: True)
    plain, screened = fresh(), fresh()
    method, settings = METHODS[name], {"micro_batch_tokens": 60, "measure_alignment": False}
    expected = learner(plain, method, "never", **settings).learn(given(plain), updates=1, seed=1)
    found = learner(screened, method, "always", **settings).learn(given(screened), updates=1, seed=1)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert numbers(found)["sources"] == numbers(expected)["sources"]  # the same forward passes
    largest = max(float(gradient.abs().max()) for gradient in gradients(plain))
    for mine, theirs in zip(gradients(screened), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6 * largest)
    assert found.screened_out > 0


def test_a_clipped_response_costs_one_forward_pass() -> None:
    agent = fresh()
    far = [sample(agent, which, 0.4, 1.0, own=False) for which in range(4)]
    near = [sample(agent, which, 0.9, 1.0, own=False) for which in range(2)]
    mine = learner(agent, METHODS["hacpo"], "always", lr=1e-9, micro_batch_tokens=1)
    with passes(agent) as counted:
        stats = mine.learn([*far, *near], updates=1, seed=0)
    # six responses are screened, the two inside the interval are computed again
    assert counted == {"forward": 6, "forward and backward": 2}
    assert (stats.screened, stats.screened_out) == (6, 4)
    assert sorted(stats.sources["other"].clipped) == [0, 0, 1, 1, 1, 1]
    assert sorted(stats.sources["other"].ratios) == pytest.approx([0.4] * 4 + [0.9] * 2, abs=1e-5)


def test_auto_screens_the_sources_whose_gradients_were_zero_before() -> None:
    """The partner's responses are all clipped, the own ones are not. The first step measures it."""
    agent = fresh()
    mine = learner(agent, METHODS["hacpo"], "auto", lr=1e-9, micro_batch_tokens=1)
    own = [sample(agent, which, 1.0, 1.0) for which in range(4)]
    far = [sample(agent, which, 0.4, 1.0, own=False) for which in range(4)]
    found = []
    for _ in range(2):
        with passes(agent) as counted:
            stats = mine.learn([*own, *far], updates=1, seed=0)
        found.append((counted, stats.screened, stats.screened_out))
    assert found[0] == ({"forward": 0, "forward and backward": 8}, 0, 0)
    assert found[1] == ({"forward": 4, "forward and backward": 4}, 4, 4)


def test_auto_is_exact_on_resume() -> None:
    """The state of a learner after one step makes another one repeat its second step, to the bit."""
    method, settings = METHODS["hacpo"], {"micro_batch_tokens": 40}
    going, again = fresh(), fresh()
    first = learner(going, method, "auto", **settings)
    first.learn(given(going), updates=2, seed=0)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["gradient_shares"]["other"].keys() == {"0", "1"}
    resumed = learner(again, method, "auto", **settings)
    tensors = {key: value.clone() for key, value in first.optimizer.tensors().items()}
    resumed.load_state_dict(state)
    resumed.optimizer.load_tensors(tensors)
    samples = given(fresh())
    expected = first.learn(samples, updates=2, seed=1)
    found = resumed.learn(samples, updates=2, seed=1)
    assert expected.screened > 0
    assert found.losses == expected.losses
    assert (found.screened, found.screened_out) == (expected.screened, expected.screened_out)
    assert largest_difference(weights(again), weights(going)) == 0.0


def stats_of(shares: dict[str, float]) -> LearnStats:
    """Return an update in which so large a share of each source's 1000 tokens had a gradient."""
    sources = {
        name: SourceStats(pass_tokens=1000, gradient_tokens=round(1000 * s)) for name, s in shares.items()
    }
    return LearnStats(sources=sources)


def of_source(source: str, count: int = 10) -> list[LearnerSample]:
    return [
        LearnerSample((4,) * 10, (5,) * 90, None, -1.0, 90, source, source == "char", 1.0)
        for _ in range(count)
    ]


def test_screening_pays_if_it_saves_more_than_it_costs() -> None:
    agent = fresh()
    policy = ScreeningPolicy("auto", agent.model)
    assert forward_share(agent.model) == pytest.approx(1 / 3)  # forward, backward: activations and weights
    both = [*of_source("char"), *of_source("other")]
    assert policy.sources(both, 0, packed=False) == frozenset()  # nothing is known
    policy.record(stats_of({"char": 1.0, "other": 0.7}), 0)
    assert policy.sources(both, 0, packed=False) == frozenset()  # 1/3 + 0.7 > 1
    policy.record(stats_of({"char": 1.0, "other": 0.5}), 0)  # mean of 0.7 and 0.5
    assert policy.sources(both, 0, packed=False) == frozenset()  # (1 + 1/3 + 0.6) / 2 is above 0.95
    policy.record(stats_of({"char": 1.0, "other": 0.2}), 0)  # mean of 0.6 and 0.2: (1 + 1/3 + 0.4) / 2
    assert policy.sources(both, 0, packed=False) == frozenset({"other"})
    # one of ten: (9 + 1/3 + 0.4) / 10 is above 0.95, not worth a further micro-batch
    assert policy.sources([*of_source("char", 9), *of_source("other", 1)], 0, packed=False) == frozenset()
    assert ScreeningPolicy("never", agent.model).sources(both, 0, packed=False) == frozenset()
    assert ScreeningPolicy("always", agent.model).sources(both, 0, False) == frozenset({"char", "other"})


def test_prompts_that_are_no_longer_shared_count_as_work() -> None:
    """One prompt of 900 tokens and two responses of 100: 1,100 tokens packed.

    Screened apart, the other's response takes 1,000 x (1/3 + 0.05), and the own one 1,000 tokens.
    """
    agent = fresh()
    policy = ScreeningPolicy("auto", agent.model)
    policy.record(stats_of({"char": 1.0, "other": 0.05}), 0)
    own = LearnerSample((4,) * 900, (5,) * 100, None, -1.0, 100, "char", True, 1.0)
    both = [own, replace(own, source="other", is_own=False)]
    assert policy.sources(both, 0, packed=True) == frozenset()  # 1,383 tokens of work instead of 1,100
    assert policy.sources(both, 0, packed=False) == frozenset({"other"})  # 1,383 instead of 2,000


def test_shares_belong_to_the_update_of_a_step() -> None:
    policy = ScreeningPolicy("auto", fresh().model)
    policy.record(stats_of({"other": 0.9}), 0)
    policy.record(stats_of({"other": 0.1}), 2)
    samples = of_source("other")
    chosen = [bool(policy.sources(samples, update, packed=False)) for update in range(4)]
    assert chosen == [False, False, True, True]  # an update that was never made is like the one before
    restored = ScreeningPolicy("auto", fresh().model)
    restored.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert restored.state_dict() == policy.state_dict() == {"other": {"0": 0.9, "2": 0.1}}


def test_the_share_of_a_forward_pass_depends_on_what_the_backward_pass_computes(tmp_path: Path) -> None:
    whole = fresh()
    whole.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert forward_share(whole.model) == pytest.approx(1 / 4)  # layers are computed a second time
    fresh().save(tmp_path)
    lora = LoraSettings(rank=1, alpha=1.0)
    adapted = Agent.load(AgentSettings(name="char", model=str(tmp_path), lora=lora), "cpu").model
    assert 1 / 2.2 < forward_share(adapted) < 1 / 2  # hardly a gradient of weights


def test_tokens_with_a_gradient_are_counted_with_their_prompts() -> None:
    """Rows of 4 + 1 and 10 + 6 tokens, of which the first alone has a gradient."""
    agent = fresh()
    near = sample(agent, 2, 0.9, 1.0, own=False)  # prompt of 4 tokens, response of 1
    far = sample(agent, 1, 0.4, 1.0, own=False)  # 10 and 6
    stats = learner(agent, METHODS["hacpo"], "never", micro_batch_tokens=1).learn([near, far], 1, 0)
    assert (stats.sources["other"].gradient_tokens, stats.sources["other"].pass_tokens) == (5, 21)


def test_a_gradient_that_is_no_number_is_not_screened_out() -> None:
    """The update is left out, as without screening."""
    for mode in ("never", "always"):
        agent = fresh()
        bad = replace(sample(agent, 0, 1.0, 1.0), behaviour_logprob=math.nan)
        before = weights(agent)
        stats = learner(agent, METHODS["gspo"], mode).learn([bad, sample(agent, 1, 1.0, 1.0)], 1, 0)
        assert (stats.bad_updates, stats.updates) == (1, 0)
        assert largest_difference(weights(agent), before) == 0.0


def test_alignment_is_measured_as_without_screening() -> None:
    results = []
    for mode in ("never", "always"):
        agent = fresh()
        probes = [replace(one, source="probed", is_probe=True) for one in given(agent) if not one.is_own]
        samples = [*given(agent), *probes]
        aligned = learner(agent, METHODS["aligned"], mode).learn(samples, 2, 0).alignments
        agent = fresh()
        cosine = learner(agent, METHODS["hacpo"], mode).learn(given(agent), 2, 0).alignment
        results.append(({source: found.cosine for source, found in aligned.items()}, cosine))
    (expected, one), (found, other) = results
    assert found == pytest.approx(expected, abs=1e-5)
    assert found.keys() == {"other", "third", "probed"}
    assert other == pytest.approx(one, abs=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "char"
    fresh().save(path)
    return path


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8.0)])
def test_adapters_and_gradient_checkpointing(folder: Path, lora: LoraSettings | None) -> None:
    settings = AgentSettings(name="char", model=str(folder), lora=lora, gradient_checkpointing=True)
    found = []
    for mode in ("never", "always"):
        agent = Agent.load(settings, "cpu", seed=0)
        stats = learner(agent, METHODS["hacpo-kl"], mode, micro_batch_tokens=40).learn(given(agent), 2, 0)
        found.append((stats.losses, stats.grad_norms, stats.screened_out, weights(agent)))
    never, always = found
    assert always[0] == pytest.approx(never[0], rel=1e-5)
    assert always[1] == pytest.approx(never[1], rel=1e-5)
    assert (never[2], always[2] > 0) == (0, True)
    assert largest_difference(always[3], never[3]) < 2e-5


def learn_as_rank(
    group: RankGroup, folder: Path, samples: list[LearnerSample], mode: str, packed: bool
) -> dict[str, Any]:
    if packed:
        logprobs.has_fused_attention = lambda model: True
        logprobs.has_tree_attention = lambda model: True
    agent = ShardedAgent.load_shards(AgentSettings(name="big", model=str(folder)), "cpu", group)
    return three_steps(learner(agent, METHODS["hacpo-kl"], mode, micro_batch_tokens=30, exact=False), samples)


def three_steps(mine: Learner, samples: list[LearnerSample]) -> dict[str, Any]:
    steps = [mine.learn(samples, updates=2, seed=step) for step in range(3)]
    return {
        "losses": [loss for stats in steps for loss in stats.losses],
        "norms": [norm for stats in steps for norm in stats.grad_norms],
        "screened": [(stats.screened, stats.screened_out) for stats in steps],
        "state": mine.state_dict(),
        "weights": mine.optimizer.tensors(),
    }


@pytest.mark.parametrize(("mode", "packed"), [("always", False), ("auto", True)])
def test_ranks_screen_and_divide_what_remains(folder: Path, mode: str, packed: bool) -> None:
    """Against one process without screening. A rank may have no response with a gradient at all."""
    whole = Agent.load(AgentSettings(name="big", model=str(folder)), "cpu")
    far = [sample(whole, which % 6, 0.4, 1.0, own=False) for which in range(7)]
    samples = [*given(whole), *far]
    samples = [replace(one, source="big") if one.is_own else one for one in samples]
    plain = learner(whole, METHODS["hacpo-kl"], "never", micro_batch_tokens=30, exact=False)
    expected = three_steps(plain, samples)
    found, follower = run_ranks(learn_as_rank, 2, folder, samples, mode, packed)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["screened"] == follower["screened"]
    assert found["state"] == follower["state"]
    assert found["screened"][-1][1] > 5
    for key, tensor in expected["weights"].items():
        assert torch.allclose(found["weights"][key], tensor, atol=2e-4), key
