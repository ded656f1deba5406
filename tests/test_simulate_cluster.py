"""The simulated cluster: runs of two agents worked out by hand, scaling rules, and the calibration."""

from __future__ import annotations

import heapq
import math
import pickle
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, no package

from cluster_calibration import FOREIGN_LENGTH, SOURCE, calibrate
from cluster_costs import Costs, Lengths, Model, Plan, Times, micro_batch_tokens, times_of
from cluster_events import Batch, Clock, Decoding, Engine, Process
from cluster_run import Mode, Run, Sharing, Spent, draw_lengths, end_of_verifying
from cluster_volumes import mean_length, volumes
from record_traffic import make_rollouts
from shapes import SHAPES, letter_tokenizer
from simulate_cluster import fleet, placements

FREE = Costs(record_bytes=0, record_put=0, record_get=0, log_write=0, learnt_write=0, retokenise=0, prepare=0)
TIMES = Times(
    decode=0.01,
    read_weights=0,
    per_response=0,
    per_context=0,
    prefill=0,
    learn=0.001,
    micro_batch=10**9,
    gather=0,
    update=0,
    sync=0,
)
# 2 prompts x 2 responses of 100 tokens: 400 tokens, and 20 of prompts
PLAN = Plan(
    "a",
    Model(1e9, 1, 1, 1),
    colocated=False,
    prompts=2,
    responses=2,
    prompt_tokens=10,
    lengths=Lengths(100, 0.0, 100),
    verify=0.0,
    verifiers=1,
)
PAIR = (PLAN, replace(PLAN, name="b"))


def ends_of(decoding: Decoding) -> list[float]:
    return [time for time, _ in decoding.ended]


# Engines


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (1, [1.0, 1.5, 1.8]),  # one after the other: 100, 50 and 30 steps of 0.01 s
        (2, [0.5, 0.8, 1.0]),  # 100 and 50 begin; at 50 the slot goes to 30, which ends at step 80
        (3, [0.3, 0.5, 1.0]),
    ],
)
def test_responses_wait_for_a_slot(slots: int, expected: list[float]) -> None:
    decoding = Decoding(TIMES, slots, prompt_tokens=0)
    decoding.add(Batch(0, 3), [100, 50, 30])
    decoding.advance(math.inf)
    assert ends_of(decoding) == pytest.approx(expected)


def test_a_decode_step_reads_weights_or_computes_and_reads_the_context() -> None:
    """2 responses of 2 tokens to prompts of 5, then one alone for a third step.

    A step takes 1 + max(3, 2 x 2) + 0.1 x context. Two steps with 10 tokens that grow to 14, 12 on average:
    2 x (5 + 0.1 x 12) = 12.4. Then 7.5 tokens of the one that is left: 1 + 3 + 0.1 x 7.5 = 4.75.
    """
    times = replace(TIMES, decode=1.0, read_weights=3.0, per_response=2.0, per_context=0.1)
    decoding = Decoding(times, 8, prompt_tokens=5)
    decoding.add(Batch(0, 2), [2, 3])
    decoding.advance(math.inf)
    assert ends_of(decoding) == pytest.approx([12.4, 17.15])


@pytest.mark.parametrize("seed", range(5))
def test_decoding_equals_a_simulation_of_single_steps(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 60) for _ in range(40)]
    slots = rng.randint(1, 12)
    times = replace(TIMES, read_weights=0.003, per_response=0.001, per_context=1e-5)
    decoding = Decoding(times, slots, prompt_tokens=7)
    decoding.add(Batch(0, 40), lengths)
    for until in sorted(rng.uniform(0, 5) for _ in range(10)):  # interrupted, as by other agents' events
        decoding.advance(until)
    decoding.advance(math.inf)
    now, waiting, running, ends = 0.0, list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 7.0])  # tokens to come, context
        context = sum(held + 0.5 for _, held in running)  # in the middle of the step
        now += 0.01 + max(0.003, 0.001 * len(running)) + 1e-5 * context
        running = [[left - 1, held + 1] for left, held in running]
        ends += [now for left, _ in running if not left]
        running = [one for one in running if one[0]]
    assert ends_of(decoding) == pytest.approx(ends, abs=1e-9)


def test_an_engine_keeps_responses_while_it_is_paused() -> None:
    """100 steps of 0.01 s with a pause of 0.25 s at 0.4; a second batch at 0.9 ends with 20 steps at 1.1."""
    clock = Clock()
    engine = Engine(Decoding(TIMES, 8, 0), clock)
    first, second = Batch(0, 1), Batch(1, 1)

    def events() -> Process:
        engine.submit(first, [100], prompts=1)
        yield None, 0.4
        engine.pause(0.25)
        yield None, 0.9
        engine.submit(second, [20], prompts=1)

    clock.start(events())
    clock.run()
    assert first.ends == pytest.approx([1.25])
    assert second.ends == pytest.approx([1.1])


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_verifying_ends_as_with_workers_that_take_what_ended_first(workers: int) -> None:
    rng = random.Random(workers)
    ends = [rng.uniform(0, 10) for _ in range(50)]
    free = [0.0] * workers
    for end in sorted(ends):
        heapq.heappush(free, max(heapq.heappop(free), end) + 0.4)
    plan = replace(PLAN, verify=0.4, verifiers=workers)
    assert end_of_verifying(ends, plan) == pytest.approx(max(free))


def test_lengths_have_the_distributions_median_and_limit() -> None:
    plan = replace(PLAN, prompts=5000, lengths=Lengths(300, 1.0, 1000))
    drawn = draw_lengths(numpy.random.default_rng(0), plan)
    assert drawn.shape == (5000, 2)
    assert numpy.median(drawn) == pytest.approx(300, rel=0.05)
    assert drawn.max() == 1000
    assert 1 <= drawn.min() < 30


# Runs


def run(plans: tuple[Plan, ...], times: list[Times], steps: int, **options: object) -> list[Spent]:
    return Run(plans, steps, times=times, **{"costs": FREE, **options}).run()  # type: ignore[arg-type]


def test_a_synchronous_step_of_two_agents_to_the_second() -> None:
    """a samples for 1 s, b for 2 s; each verifies 4 responses of 0.5 s one by one; logging takes 0.4 s each.

    a is in the log at 1 + 2 + 0.4 = 3.4, b at 2 + 2 + 0.4 = 4.4. Both learn from 800 + 20 tokens (0.82 s) and
    sync (0.1 s) until 5.32. The driver logs 800 learnt tokens of a until 5.72 and of b until 6.12.
    """
    plans = tuple(replace(plan, verify=0.5) for plan in PAIR)
    times = [replace(TIMES, sync=0.1), replace(TIMES, sync=0.1, decode=0.02)]
    costs = replace(FREE, log_write=0.001, learnt_write=0.0005)
    first, second = run(plans, times, 1, costs=costs)
    assert first.end == second.end == pytest.approx(6.12)
    common = {"verifying": 2.0, "preparing": 0.0, "learning": 0.82, "weight sync": 0.1}
    assert first.phases == pytest.approx({**common, "sampling": 1.0, "communication": 0.8, "waiting": 1.4})
    assert second.phases == pytest.approx({**common, "sampling": 2.0, "communication": 1.2, "waiting": 0.0})
    assert first.learnt_responses == 2 * (2 + 2)
    three = run(plans, times, 3, costs=costs)
    assert [one.end for one in three] == pytest.approx([3 * 6.12] * 2)


def test_the_cap_limits_what_is_learnt_and_prepared() -> None:
    """G = 2, two others with 2 responses each, at most 1 of the 4: a quarter of 800 tokens.

    Preparing: 600 tokens x 0.001 and 200 other tokenizers' x 0.002; learning (400 + 200 + 20) x 0.001.
    """
    plans = (PLAN, replace(PLAN, name="b", tokenizer="x"), replace(PLAN, name="c", tokenizer="x"))
    costs = replace(FREE, prepare=0.001, retokenise=0.002)
    spent, *_ = run(plans, [TIMES] * 3, 1, sharing=Sharing(cap=1), costs=costs)
    assert spent.phases["preparing"] == pytest.approx(0.6 + 0.4)
    assert spent.phases["learning"] == pytest.approx(0.62)
    assert spent.learnt_responses == 2 * (2 + 1)


def test_agents_alone_learn_from_their_own_rollouts_only() -> None:
    spent = run(PAIR, [TIMES, replace(TIMES, decode=0.05)], 1, sharing=Sharing(cross=False))
    assert [one.phases["learning"] for one in spent] == pytest.approx([0.42, 0.42])
    assert spent[0].phases["waiting"] == pytest.approx(4.0)  # the step still ends with the slower agent


def test_agents_on_the_same_gpus_take_turns() -> None:
    """Sampling 1 s + 1 s, then learning 0.82 s + 0.82 s."""
    first = replace(PLAN, colocated=True)
    spent = run((first, replace(first, name="b", gpus_of="a")), [TIMES] * 2, 2)
    assert [one.end for one in spent] == pytest.approx([2 * 3.64] * 2)


def test_communication_of_ranks_hides_behind_learning() -> None:
    """820 tokens in micro-batches of 200: 5 gathers of 0.1 s hide behind 0.82 s, those of 0.2 s do not."""
    for gather, exposed in ((0.1, 0.0), (0.2, 5 * 0.2 - 0.82)):
        times = replace(TIMES, micro_batch=200, gather=gather)
        spent, _ = run(PAIR, [times] * 2, 1)
        assert spent.phases["communication"] == pytest.approx(exposed)
        assert spent.phases["learning"] == pytest.approx(0.82)


@pytest.mark.parametrize(
    ("learn", "synchronous", "asynchronous"),
    [
        (0.5, 10 * 1.5, 10 * 1.0 + 0.5),  # bound by sampling: the last step is learnt when all are sampled
        (2.0, 10 * 3.0, 1.0 + 10 * 2.0),  # bound by learning: only the first step is waited for
    ],
)
def test_asynchrony_hides_the_shorter_of_sampling_and_learning(
    learn: float, synchronous: float, asynchronous: float
) -> None:
    times = [replace(TIMES, learn=learn / 820)] * 2
    assert run(PAIR, times, 10)[0].end == pytest.approx(synchronous)
    spent = run(PAIR, times, 10, mode=Mode(max_staleness=1))[0]
    assert spent.end == pytest.approx(asynchronous)
    # Step 0 is sampled with version 0, step t with version t - 1. That holds where learning is fast, too:
    # version t comes 0.5 s after step t has begun.
    assert spent.staleness == 9


def test_weights_that_arrive_in_mid_generation_cost_a_pause() -> None:
    """Sampling 1 s, learning 0.3 s, sync 0.2 s, staleness 1: each later step takes 1.2 s to sample."""
    times = [replace(TIMES, learn=0.3 / 820, sync=0.2)] * 2
    spent = run(PAIR, times, 4, mode=Mode(max_staleness=1))[0]
    assert spent.end == pytest.approx(1.0 + 3 * 1.2 + 0.5)


@pytest.mark.parametrize(("staleness", "learnt", "dropped"), [(1, 12, 1), (2, 16, 0)])
def test_patience_ends_and_late_rollouts_are_learnt_or_dropped(
    staleness: int, learnt: int, dropped: int
) -> None:
    """a samples for 1 s, b for 4.7 s; learning takes 0.5 s, patience 1 s.

    a learns step 0 from 2.0 to 2.5, step 1 from 3.5 to 4.0, step 2 from 5.0 to 5.5. At 5.0 it finds b's first
    rollouts, which are 2 steps old.
    """
    times = [replace(TIMES, learn=0.0, update=0.5), replace(TIMES, learn=0.0, update=0.5, decode=0.047)]
    fast, slow = run(PAIR, times, 3, mode=Mode(staleness, patience=1.0))
    assert fast.end == pytest.approx(5.5)
    assert fast.learnt_responses == learnt
    assert (fast.taken, fast.dropped) == (1 - dropped, dropped)
    assert slow.end == pytest.approx(3 * 4.7 + 0.5)  # never waits: a is always ahead
    assert slow.learnt_responses == 3 * 8


@pytest.mark.parametrize("mode", [Mode(), Mode(1), Mode(3, 5.0)], ids=str)
def test_phases_add_up_to_the_whole_run_and_seeds_decide(mode: Mode) -> None:
    plans = [replace(plan, prompts=16, lengths=Lengths(400, 1.0, 4000)) for plan in fleet(8)]
    runs = [Run(plans, 4, mode, Sharing(cap=8), seed=seed).run() for seed in (0, 0, 1)]
    for spent in runs[0]:
        assert sum(spent.phases.values()) == pytest.approx(spent.end)
    ends = [[one.end for one in spent] for spent in runs]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


# Costs


def test_scaling_rules_by_hand() -> None:
    """A model of 1e9 weights, 10 layers, 1,000 bytes of keys and values a token; 4 ranks, engines of 2 GPUs.

    Decode: 10 x 0.001 + 2 all-reduces x 10 x 0.0005 = 0.02; weights 2e9 / 1e12 / 2 = 0.001; a response
    2e9 / 1e15 / 2 = 1e-6; a token of context 1,000 / 1e12 / 2. Prefill of 100 tokens: 2e11 / 5e14 / 2 = 2e-4.
    Learning: 6e9 + 12 x 10 x 50 x (100 + 200 / 2) = 6.0012e9 FLOPs at 0.5e15 x 4.
    Gather: 8e9 x 3/4 / 1e11 = 0.06. AdamW: 30e9 / 4 / 1e12.
    Sync: 0.2 + 0.01 + 2e9 x 3/4 / 1e11 + 2e9 / 1e11 = 0.245.
    """
    costs = Costs(
        flops=1e15,
        memory=1e12,
        layer_latency=0.001,
        vllm_step=1.0,
        learning=0.5,
        sync=0.2,
        sync_per_parameter=1e-11,
        nvlink=1e11,
        network=1e10,
        all_reduce=0.0005,
    )
    plan = Plan(
        "a",
        Model(1e9, 10, 1000, 50),
        ranks=4,
        tensor_parallel=2,
        colocated=False,
        engine="transformers",
        prompt_tokens=100,
        lengths=Lengths(200, 0.0, 200),
    )
    found = times_of(plan, costs)
    expected = Times(
        decode=0.02,
        read_weights=0.001,
        per_response=1e-6,
        per_context=5e-10,
        prefill=2e-4,
        learn=6.0012e9 / 2e15,
        micro_batch=4 * 32_768,
        gather=0.06,
        update=0.0075,
        sync=0.245,
    )
    assert vars(found) == pytest.approx(vars(expected))
    # 8 ranks and 2 engine GPUs on hosts of 8: the ranks still talk over NVLink, weights cross the network
    wide = times_of(replace(plan, ranks=8, engine="vllm", checkpointing=True), costs)
    assert wide.decode == pytest.approx(1.02)
    assert wide.learn == pytest.approx(1.23 * 6.0012e9 / 4e15)
    assert wide.gather == pytest.approx(0.07)
    assert wide.sync == pytest.approx(0.21 + 2e9 * 7 / 8 / 1e11 + 2e9 / 1e10)
    assert times_of(replace(plan, ranks=16), costs).gather == pytest.approx(8e9 * 15 / 16 / 1e10)


def test_micro_batches_are_those_that_hacrl_chooses() -> None:
    """2e13 tokens x weights keep a GPU busy, between 4,096 and 32,768 tokens (docs/performance.md)."""
    assert micro_batch_tokens(0.6e9) == 32_768
    assert micro_batch_tokens(4e9) == 8192
    assert micro_batch_tokens(70e9) == 4096


def test_the_calibration_is_as_good_as_the_documentation_says() -> None:
    rows = calibrate()
    errors = {row.what.partition(",")[0] + f" {row.measured:.2f}": row.error for row in rows}
    sources = [row for row in rows if row.note == SOURCE]
    assert len(sources) == 4
    assert all(abs(row.error) <= 0.04 for row in sources), errors
    step, pair, sampling, rest, vllm, bound = (row for row in rows if row.note != SOURCE)
    assert (step.measured, pair.measured, bound.measured) == (4.52, 471.0, 0.8)
    assert abs(step.error) <= 0.10
    assert -0.15 <= pair.error <= -0.10
    assert (sampling.measured + rest.measured, sampling.measured) == (pair.measured, 107.0)
    assert -0.40 <= sampling.error <= -0.30  # longer contexts than any source has
    assert abs(rest.error) <= 0.10
    assert abs(vllm.error) <= 0.20
    assert bound.simulated < bound.measured


def test_responses_grow_in_another_tokenizer_as_the_calibration_says() -> None:
    """Random ids of one tokenizer, decoded and encoded with the other one, both ways."""
    tokenizers = [letter_tokenizer(SHAPES["qwen3-1.7b"]["vocab_size"], seed) for seed in (0, 1)]
    draw = random.Random(0)
    for own, other in (tokenizers, tokenizers[::-1]):
        ids = [draw.randrange(3, len(own)) for _ in range(4096)]
        grown = len(other.encode(own.decode(ids), add_special_tokens=False)) / len(ids)
        assert grown == pytest.approx(FOREIGN_LENGTH, rel=0.02)


def test_the_fleet_has_a_thousand_gpus() -> None:
    assert sum(plan.gpus for plan in fleet(64)) == 1000
    gpus = {name: sum(plan.gpus for plan in plans) for name, (plans, _) in placements().items()}
    assert list(gpus.values()) == [8, 8, 32, 32, 1000]


def test_the_bytes_of_a_record_are_those_that_the_simulation_uses() -> None:
    rollouts = make_rollouts(512, 256)
    assert len(rollouts) == 512
    assert len({verified.rollout.problem.id for verified in rollouts}) == 64
    size = len(pickle.dumps(rollouts, protocol=5)) / (512 * 256)
    assert size == pytest.approx(Costs().record_bytes, rel=0.02)


def test_volumes_by_hand() -> None:
    """Three agents of 400 tokens, G = 2, one with another tokenizer; others' capped at 1 of 4, so 200 tokens.

    Collected: 1,200 tokens of 20.1 bytes, fetched by three learners; 38.3 bytes in the log. Learnt log: a and
    b have 400 + 100 own tokens and 100 foreign ones each, c has 400 and 200. Driver: 1,200 x 0.365 us +
    1,800 x 0.177 us. a: 4 ranks, micro-batches of 4 x 50 tokens, 620 computed: 4 passes of 8e9 x 3/4 bytes.
    """
    first = replace(PLAN, ranks=4, micro_batch=50)
    plans = [first, replace(PLAN, name="b"), replace(PLAN, name="c", tokenizer="x", engines=2)]
    found = volumes(plans, Sharing(cap=1))
    assert found.collected == pytest.approx(1200 * 20.1)
    assert found.fetched == pytest.approx(3 * 1200 * 20.1)
    assert found.log == pytest.approx(1200 * 38.3)
    assert found.learnt_log == pytest.approx((500 + 500 + 400) * 8.6 + (100 + 100 + 200) * 14.9)
    assert found.driver_seconds == pytest.approx(1200 * 0.365e-6 + 1800 * 0.177e-6)
    assert found.gathered == pytest.approx(4 * 6e9)
    assert found.weights == pytest.approx(4 * 2e9)  # two agents with one engine, one with two
    assert found.checkpoint == pytest.approx(3 * 12e9)


def test_the_mean_length_is_that_of_drawn_ones() -> None:
    lengths = Lengths(300, 1.0, 1000)
    drawn = draw_lengths(numpy.random.default_rng(0), replace(PLAN, prompts=100_000, lengths=lengths))
    assert mean_length(lengths) == pytest.approx(drawn.mean(), rel=0.005)
    assert mean_length(Lengths(300, 0.0, 200)) == 200


DOCUMENT = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text("utf-8")


def test_the_documentation_has_the_calibration() -> None:
    for row in calibrate():
        digits = 0 if row.measured > 100 else 2
        assert f"{row.measured:.{digits}f} | {row.simulated:.{digits}f} |" in DOCUMENT, row


def test_the_documentation_has_the_volumes() -> None:
    for name, (plans, sharing) in placements().items():
        one = volumes(plans, sharing)
        if plans[0].colocated:
            continue  # not in the table: the same rollouts as with engines apart
        numbers = (one.driver_seconds, one.gathered / 1e9, one.weights / 1e9, one.checkpoint / 1e9)
        cells = f"{numbers[0]:.1f} | " + " | ".join(f"{number:,.0f}" for number in numbers[1:])
        assert f"| {cells} |" in DOCUMENT, name
