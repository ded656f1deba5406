"""max_cross_rollouts: which responses of other agents are chosen, and what the limit must not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms.advantage import Normaliser
from hacrl.algorithms.context import StepContext
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AlignedSettings,
    AnyMethodSettings,
    GspoSettings,
    HacpoSettings,
    NaiveSettings,
)
from hacrl.models.agent import Agent
from hacrl.models.retokenizing import Retokeniser
from hacrl.rollouts.groups import PromptGroup
from hacrl.runs.run import run_locally
from hacrl.training.samples import Candidate, LearnerSamples, SampleBuilder, most_useful_first
from tests.runs.test_resume import go_on, left_after
from tests.support.chaos import chaos_config, differing_files
from tests.support.rollouts import judged, rollout
from tests.support.sevens import problem
from tests.support.texts import decode_response
from tests.support.tiny import char_agent, pair_agent
from tests.training.runs import HACPO, Runs, assert_moved, assert_same_weights

Said = list[tuple[str, float]]  # text and reward
EXACT = Normaliser(epsilon=0.0)


def candidates(**rewards: list[float]) -> list[Candidate]:
    """Return candidates from each source's rewards; the advantage is the reward minus one half."""
    return [Candidate(name, i, r, r - 0.5) for name, listed in rewards.items() for i, r in enumerate(listed)]


def test_candidates_with_signal_come_first_then_high_rewards() -> None:
    given_candidates = [
        Candidate("bob", 0, 1.0, 0.0),  # right, but nothing follows from it
        Candidate("bob", 1, 0.0, -0.5),
        Candidate("bob", 2, 0.5, 0.25),
        Candidate("bob", 3, 0.0, 0.0),
        Candidate("bob", 4, 1.0, 0.5),
    ]
    for seed in range(5):
        assert [one.index for one in most_useful_first(given_candidates, seed, "1:")] == [4, 2, 1, 0, 3]


def test_sources_take_turns_among_equals() -> None:
    # right: bob 4, carl 1, dora 2. Turns: one each, then bob and dora, then bob's last two. Wrong: carl has
    # two and dora one left, and both have had less than bob: carl (1) before dora (2).
    given_candidates = candidates(bob=[1, 1, 1, 1], carl=[1, 0, 0], dora=[1, 0, 1])
    for seed in range(20):
        turns = [one.source for one in most_useful_first(given_candidates, seed, "1:")]
        assert set(turns[:3]) == {"bob", "carl", "dora"}
        assert set(turns[3:5]) == {"bob", "dora"}
        assert turns[5:7] == ["bob", "bob"]
        assert turns[7] == "carl"
        assert sorted(turns[8:]) == ["carl", "dora"]  # two each by now: either may be next


def test_draws_are_even_and_keyed_by_seed_and_prompt() -> None:
    given_candidates = candidates(bob=[1, 1, 1, 1], carl=[1, 1, 1, 1])
    first = Counter(
        (one := most_useful_first(given_candidates, seed, "1:")[0]).source + str(one.index)
        for seed in range(4000)
    )
    # 8 equal responses, 4000 draws: 500 each, standard deviation sqrt(4000 * 1/8 * 7/8) = 21
    assert len(first) == 8
    assert all(abs(count - 500) < 4 * 21 for count in first.values())
    assert most_useful_first(given_candidates, 0, "1:") == most_useful_first(given_candidates, 0, "1:")
    assert len({tuple(most_useful_first(given_candidates, 0, f"{i}:")) for i in range(10)}) == 10


some_candidates = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, -1.0, 2.0])),
    max_size=24,
).map(lambda rows: [Candidate(source, i, reward, adv) for i, (source, reward, adv) in enumerate(rows)])


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    given_candidates=some_candidates, seed=st.integers(0, 2**63 - 1), rng=st.randoms(use_true_random=False)
)
def test_the_ranking_follows_its_rules_for_any_order_of_candidates(
    given_candidates: list[Candidate], seed: int, rng
) -> None:
    order = most_useful_first(given_candidates, seed, "1:")
    mixed = list(given_candidates)
    rng.shuffle(mixed)
    assert most_useful_first(mixed, seed, "1:") == order
    assert sorted(order, key=lambda one: one.index) == given_candidates  # each once
    worth = [(one.advantage != 0, one.reward) for one in order]
    assert worth == sorted(worth, reverse=True)
    had: Counter[str] = Counter()
    for i, one in enumerate(order):  # a source chosen less often comes first among equals
        equals = {other.source for other, w in zip(order[i:], worth[i:], strict=True) if w == worth[i]}
        assert had[one.source] == min(had[source] for source in equals)
        had[one.source] += 1


AGENTS = {"ada": char_agent("ada"), "bob": pair_agent("bob"), "carl": pair_agent("carl", seed=5)}


def group(prompt: str, **said: Said) -> PromptGroup:
    return PromptGroup(
        problem(prompt),
        {
            name: tuple(judged(rollout(AGENTS[name], text, prompt=prompt), reward) for text, reward in listed)
            for name, listed in said.items()
        },
    )


def build(
    groups: Sequence[PromptGroup],
    cap: int | None,
    learner: str | Agent = "ada",
    method: AnyMethodSettings | None = None,
    seed: int = 0,
    retokeniser: Retokeniser | None = None,
) -> LearnerSamples:
    agent = AGENTS[learner] if isinstance(learner, str) else learner
    made = make_method(method or NaiveSettings(), normaliser=EXACT)
    builder = SampleBuilder(agent, made, max_cross_rollouts=cap, retokeniser=retokeniser)
    return builder.build(groups, lambda k, j: {"ada": 0.5, "bob": 1.0, "carl": 0.25}[k] / 0.5, seed)


def texts(built: LearnerSamples, learner: str = "ada") -> list[tuple[str, str]]:
    agent = AGENTS[learner]
    return [(one.source, decode_response(agent, one.response_ids[:-1], ())) for one in built.samples]


MIXED = [
    group("1:", ada=[("7", 1), ("1", 0)], bob=[("77", 1), ("12", 0)], carl=[("17", 1), ("71", 1)]),
    group("23:", ada=[("2", 0), ("3", 0)], bob=[("5", 0), ("6", 0)], carl=[("8", 0), ("9", 0)]),
]


def test_chosen_samples_equal_those_without_a_limit() -> None:
    """Same advantages, same tokens, same order; own responses are all there."""
    whole = build(MIXED, None, method=HacpoSettings()).samples
    for cap in (1, 2, 3):
        built = build(MIXED, cap, method=HacpoSettings())
        assert [one for one in whole if one in built.samples] == built.samples
        assert [one for one in built.samples if one.is_own] == [one for one in whole if one.is_own]
        assert len(built.samples) == 4 + 2 * cap  # own, and the cap for each of two prompts
        # 4 of others per prompt
        assert built.left_out.total() == 2 * (4 - cap)
        assert not built.dropped
    for cap in (4, 5):
        assert build(MIXED, cap, method=HacpoSettings()) == build(MIXED, None, method=HacpoSettings())


def test_correct_answers_of_every_source_come_first() -> None:
    # others' right answers are "77" of bob, "17" and "71" of carl; "12" is wrong; the baseline of naive
    # sharing is (.5 + .5 + 1) / 3, so that no advantage is 0
    for seed in range(10):
        chosen = texts(build(MIXED[:1], 2, seed=seed))
        assert chosen[:3] == [("ada", "7"), ("ada", "1"), ("bob", "77")]
        assert chosen[3] in [("carl", "17"), ("carl", "71")]
        assert build(MIXED[:1], 2, seed=seed).left_out == {"bob": 1, "carl": 1}
        assert texts(build(MIXED[:1], 3, seed=seed))[2:] == [("bob", "77"), ("carl", "17"), ("carl", "71")]
    assert {texts(build(MIXED[:1], 2, seed=seed))[3][1] for seed in range(10)} == {"17", "71"}


def test_a_dropped_cross_response_is_replaced_by_the_next() -> None:
    # bob's right answers have a letter or are too long for ada's 64 positions; then carl's wrong one is next
    given = [
        group("1:", ada=[("7", 1), ("1", 0)], bob=[("7a", 1), ("7" * 70, 1), ("7", 1)], carl=[("2", 0)]),
        group("23:", ada=[("7", 1), ("a", 0)], bob=[("77", 1), ("1", 0), ("2", 0)], carl=[("5", 0)]),
    ]
    built = build(given, 2)
    # ada's own "a" is <unk>, a token of hers that is reused: it is not lost
    assert texts(built)[:4] == [("ada", "7"), ("ada", "1"), ("bob", "7"), ("carl", "2")]
    assert texts(built)[6:] == [("bob", "77"), ("carl", "5")]  # bob has had a turn
    assert built.dropped == {("bob", "not_representable"): 1, ("bob", "too_long"): 1}
    assert built.left_out == {"bob": 2}
    # with nothing left to replace them, there are fewer
    few = build(given[:1], 3)
    assert (len(few.samples), few.left_out) == (4, {})
    one = build(given[:1], 1)
    assert texts(one)[2:] in ([("bob", "7")], [("carl", "2")])
    assert sum(one.dropped.values()) + one.left_out.total() + len(one.samples) == 6


def test_a_dropped_own_response_is_not_replaced() -> None:
    given = [group("1:", ada=[("7", 1), ("1" * 70, 0)], bob=[("77", 1), ("12", 0)], carl=[("17", 1)])]
    built = build(given, 1)
    assert built.dropped == {("ada", "too_long"): 1}
    assert [one.source for one in built.samples] in (["ada", "bob"], ["ada", "carl"])


class Counting(Agent):
    """Remembers the texts it encodes."""

    def encode_responses(self, texts, prompts, known=None):
        self.asked = [*getattr(self, "asked", []), *texts]
        return super().encode_responses(texts, prompts, known)


def counting(agent: Agent) -> Counting:
    return Counting(agent.name, agent.model, agent.tokenizer)


def test_left_out_responses_are_not_encoded() -> None:
    learner = counting(AGENTS["ada"])
    build(MIXED[:1], 1, learner)
    assert len(learner.asked) == 1
    assert learner.asked[0] in ("77", "17", "71")
    learner = counting(AGENTS["ada"])
    build(MIXED, None, learner)
    assert sorted(learner.asked) == ["12", "17", "5", "6", "71", "77", "8", "9"]  # each once, in one go


def test_a_method_without_sharing_ignores_the_limit() -> None:
    assert build(MIXED, 1, method=GspoSettings()) == build(MIXED, None, method=GspoSettings())


def test_the_order_of_agents_does_not_matter() -> None:
    turned = [replace(one, responses=dict(reversed(one.responses.items()))) for one in MIXED]
    for learner in AGENTS:
        for cap in (1, 2, 3):
            built = build(MIXED, cap, learner, HacpoSettings())
            assert build(turned, cap, learner, HacpoSettings()) == built


def test_learners_share_a_retokeniser_within_a_step() -> None:
    shared = Retokeniser()
    learners = [counting(char_agent(name)) for name in ("ada", "ada", "ada")]
    alone = build(MIXED, None)
    assert [build(MIXED, None, one, retokeniser=shared) for one in learners] == [alone] * 3
    assert [len(getattr(one, "asked", [])) for one in learners] == [8, 0, 0]
    build(list(MIXED), None, learners[2], retokeniser=shared)  # other rollouts, as far as it knows
    assert len(learners[2].asked) == 8


def test_a_run_with_a_limit(runs: Runs) -> None:
    """4 prompts, 3 agents with 4 responses each: learners use 3 of 8 cross responses, in 6 updates."""
    run = runs("char", "twin", "pair", learning={"max_cross_rollouts": 3}, steps=2)
    for name in ("char", "twin", "pair"):
        others = {"char", "twin", "pair"} - {name}
        for step in run.of(name):
            learnt = step["learning"]
            assert learnt["updates"] == 6
            assert set(learnt["left_out"]) <= others
            lost = sum(sum(reasons.values()) for reasons in learnt["dropped"].values())
            assert sum(learnt["left_out"].values()) == 4 * (8 - 3) - lost  # each loss was replaced
            used = sum(source["used"] for source in learnt["sources"].values()) + learnt["skipped"]
            assert used == 4 * (4 + 3)
    whole = runs("char", "twin", "pair", steps=2)
    assert all(step["learning"]["left_out"] == {} for step in whole.of("char"))
    assert_moved(run.weights("char"), whole.weights("char"))
    # what is left out stays in the capability: before the first update, the two runs are the same
    assert [run.of(name)[0]["capability"] for name in ("char", "pair")] == [
        whole.of(name)[0]["capability"] for name in ("char", "pair")
    ]


def test_a_run_with_a_limit_does_not_depend_on_the_order_of_agents(runs: Runs) -> None:
    first = runs("char", "twin", "pair", method=HACPO, learning={"max_cross_rollouts": 2})
    turned = runs("pair", "twin", "char", method=HACPO, learning={"max_cross_rollouts": 2})
    for name in ("char", "twin", "pair"):
        assert first.of(name) == turned.of(name)
        assert_same_weights(first.weights(name), turned.weights(name))


@pytest.mark.parametrize("phases", [8, 13])
def test_a_run_with_a_limit_resumes_exactly(tmp_path, phases: int) -> None:
    learning = {"lr": 2e-4, "updates_per_source": 2, "max_cross_rollouts": 2}
    whole, parts = (chaos_config(tmp_path / name, 3, learning=learning) for name in ("whole", "parts"))
    run_locally(whole)
    left_after(parts, phases)
    go_on(tmp_path / "parts")
    assert differing_files(tmp_path / "whole", tmp_path / "parts") == []


def test_probes_are_limited_beside_the_responses_that_are_trained_on() -> None:
    context = StepContext(capabilities=dict.fromkeys(AGENTS, 0.5), trusted=frozenset({"bob"}))
    for probe_share, prompts in ((1.0, 2), (0.5, 1), (0.0, 0)):
        method = make_method(AlignedSettings(), normaliser=EXACT)
        builder = SampleBuilder(AGENTS["ada"], method, max_cross_rollouts=1, probe_share=probe_share)
        built = builder.build(MIXED, lambda *_: 1.0, 0, context)
        kinds = Counter((one.source, one.is_probe) for one in built.samples)
        # two prompts: two own responses and one of bob each; one of carl, who is not trusted, if probed
        assert kinds == {("ada", False): 4, ("bob", False): 2} | (
            {("carl", True): prompts} if prompts else {}
        )
        fates = Counter((one.agent, one.fate) for one in built.not_used)
        assert fates == {("bob", "over_limit"): 2, ("carl", "not_shared"): 4 - prompts}


def test_draws_differ_by_run_learner_and_step(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    build_samples = SampleBuilder.build

    def build(self: SampleBuilder, groups, ratio, seed: int, context) -> LearnerSamples:
        seeds.append(seed)
        return build_samples(self, groups, ratio, seed, context)

    monkeypatch.setattr(SampleBuilder, "build", build)
    for seed in (0, 1):
        runs("char", "pair", steps=2, seed=seed)
    assert len(set(seeds)) == 2 * 2 * 2
