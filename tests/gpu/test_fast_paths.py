"""What a GPU does differently: recorded graphs, slots, packing, compiled layers. Skipped without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings
from hacrl.engines.hf.continuous_batching import FinishedRequest, Request, decode_all
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.slot_decoder import SampledTokens, SlotDecoder
from hacrl.models.agent import Agent
from hacrl.models.device import HostCopy
from hacrl.models.logprobs import packed_logprobs, padded_logprobs
from hacrl.models.packing_support import has_fused_attention
from hacrl.training.learn_stats import LearnStats, MicroBatchResult
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Problem, Sampling
from tests.support.engines import sample_rollouts
from tests.support.tiny import character_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler looks at them
]
PROBLEMS = [Problem(text, text, "0") for text in ("(23+14)*2:", "1", "(39-19)+7:", "5*5:", "((1+2)*3-4)*5:")]
SAMPLINGS = [Sampling(24), Sampling(24, 0.7), Sampling(24, 1.0, 5), Sampling(24, 0.8, 0, 0.9)]


def agent_of(dtype: torch.dtype, window: int | None = None) -> Agent:
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():  # sharp enough that a wrong position or neighbour shows
        model.get_output_embeddings().weight.mul_(8.0)
    return Agent("ada", model.to("cuda", dtype), tokenizer)


def plain_logprobs(agent: Agent, rollouts, sampling: Sampling) -> list[torch.Tensor]:
    pairs = [(agent.encode_prompt(rollout.problem), rollout.token_ids) for rollout in rollouts]
    with torch.no_grad():
        found = padded_logprobs(agent.model, pairs, sampling, torch.device("cuda"))
    return [row[: rollout.num_tokens].cpu() for row, rollout in zip(found, rollouts, strict=True)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "gap"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"]
)
def test_graphs_sample_with_the_probabilities_of_a_plain_forward_pass(dtype, gap, sampling) -> None:
    agent = agent_of(dtype)
    engine = TransformersEngine(agent, max_batch=6)  # of 20 responses: slots are used again
    for seed in (0, 1):  # the second time with graphs recorded before
        rollouts = sample_rollouts(engine, PROBLEMS, 4, sampling, seed)
        assert engine.decoders[sampling, frozenset(engine.policy.stop_ids)]._graphs
        assert engine.decoders[sampling, frozenset(engine.policy.stop_ids)].compile_error == ""
        assert len({rollout.num_tokens for rollout in rollouts}) > 1
        for rollout, expected in zip(rollouts, plain_logprobs(agent, rollouts, sampling), strict=True):
            difference = (torch.tensor(rollout.token_logprobs) - expected).abs()
            assert difference.mean() < gap, (rollout.text, difference)


@pytest.mark.parametrize("window", [3, 8])
def test_a_sliding_window_is_kept_to(window) -> None:
    agent = agent_of(torch.bfloat16, window)
    rollouts = sample_rollouts(TransformersEngine(agent, 6), PROBLEMS, 4, Sampling(24), 0)
    for rollout, expected in zip(rollouts, plain_logprobs(agent, rollouts, Sampling(24)), strict=True):
        assert (torch.tensor(rollout.token_logprobs) - expected).abs().mean() < 0.05


def test_a_seed_fixes_the_responses_whether_or_not_graphs_are_there_already() -> None:
    engine = TransformersEngine(agent_of(torch.bfloat16), 8)
    first = sample_rollouts(engine, PROBLEMS, 4, Sampling(16), seed=5)
    again = sample_rollouts(engine, PROBLEMS, 4, Sampling(16), seed=5)
    other = sample_rollouts(engine, PROBLEMS, 4, Sampling(16), seed=6)
    assert [r.token_ids for r in again] == [r.token_ids for r in first]
    assert [r.token_ids for r in other] != [r.token_ids for r in first]


def test_memory_that_learning_will_use_again_does_not_cost_the_graphs() -> None:
    engine = TransformersEngine(agent_of(torch.bfloat16), 8)
    sample_rollouts(engine, PROBLEMS, 4, Sampling(16), seed=5)
    before = list(engine.decoders.values())
    free, total = torch.cuda.mem_get_info()
    if free < 0.7 * total:
        pytest.skip("somebody else uses the GPU")
    left = torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
    engine.sleep()
    assert not engine.decoders  # it is in use
    sample_rollouts(engine, PROBLEMS, 4, Sampling(16), seed=5)
    del left
    assert torch.cuda.mem_get_info()[0] < 0.5 * total  # it is torch's still, but nobody's
    again = list(engine.decoders.values())
    engine.sleep()
    assert len(before) == 1
    assert list(engine.decoders.values()) == again
    torch.cuda.empty_cache()


def test_tokens_are_as_frequent_as_they_are_likely() -> None:
    agent, draws = agent_of(torch.float32), 4000
    rollouts = sample_rollouts(
        TransformersEngine(agent, 512), PROBLEMS[:1], draws, Sampling(1, 0.8, 9), seed=7
    )
    counts = Counter(rollout.token_ids[0] for rollout in rollouts)
    with torch.no_grad():
        prompt = torch.tensor([agent.encode_prompt(PROBLEMS[0])], device="cuda")
        logits = agent.model(input_ids=prompt).logits[0, -1] / 0.8
    likely = torch.softmax(logits.where(logits >= logits.topk(9).values[-1], -torch.inf), -1).tolist()
    assert all(likely[token] > 0 for token in counts)
    for token, p in enumerate(likely):
        assert abs(counts[token] - draws * p) <= 5 * (draws * p * (1 - p)) ** 0.5 + 1


def test_graphs_follow_weights_that_change_and_weights_that_move() -> None:
    agent = agent_of(torch.float32)
    engine = TransformersEngine(agent, 8)
    sampling = Sampling(12)
    sample_rollouts(engine, PROBLEMS, 2, sampling, 0)
    recorded = engine.decoders[sampling, frozenset(engine.policy.stop_ids)]
    with torch.no_grad():
        agent.model.get_output_embeddings().weight.mul_(0.5)  # in place
    rollouts = sample_rollouts(engine, PROBLEMS, 2, sampling, 0)
    assert engine.decoders[sampling, frozenset(engine.policy.stop_ids)] is recorded
    for rollout, expected in zip(rollouts, plain_logprobs(agent, rollouts, sampling), strict=True):
        torch.testing.assert_close(torch.tensor(rollout.token_logprobs), expected, atol=1e-3, rtol=0)
    old = [parameter.data for parameter in agent.model.parameters()]  # kept, so that addresses are new
    for parameter in agent.model.parameters():
        parameter.data = parameter.data.clone() * 1.1
    rollouts = sample_rollouts(engine, PROBLEMS, 2, sampling, 0)
    assert len(old) > 0
    for rollout, expected in zip(rollouts, plain_logprobs(agent, rollouts, sampling), strict=True):
        torch.testing.assert_close(torch.tensor(rollout.token_logprobs), expected, atol=1e-3, rtol=0)


def sample(index: int, length: int) -> LearnerSample:
    ids = [3 + (index * 7 + place * place) % 19 for place in range(length + 5)]
    return LearnerSample(
        prompt_ids=tuple(ids[:5]),
        response_ids=tuple(ids[5:]),
        behaviour_logprobs=(-3.0,) * length,
        behaviour_logprob=-3.0 * length,
        source_length=length,
        source="ada",
        is_own=True,
        advantage=1.0 if index % 2 else -0.5,
    )


def gradients(checkpointing: bool, packed: bool, monkeypatch: pytest.MonkeyPatch, compile: bool = False):
    """Of one update, before it is made, summed in float32."""
    agent = agent_of(torch.bfloat16)
    if checkpointing:
        agent.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert has_fused_attention(agent.model)
    if not packed:
        for place in ("models.logprobs", "training.learner"):
            monkeypatch.setattr(f"hacrl.{place}.uses_packing", lambda *_: False)
        monkeypatch.setattr("hacrl.training.batching.has_fused_attention", lambda model: False)
    settings = LearningSettings(micro_batch_tokens=100, compile=compile, max_grad_norm=1e9)
    learner = Learner(agent, make_method(GspoSettings(clip_low=0.99, clip_high=9)), settings, Sampling(64))
    kept = []
    step = learner.optimizer.step
    learner.optimizer.step = lambda: (kept.extend(one.clone() for one in learner.optimizer.gradients), step())
    stats = learner.learn([sample(i, length) for i, length in enumerate((40, 3, 17, 29, 8, 30))], 1, 0)
    monkeypatch.undo()
    assert stats.notes == []
    return torch.cat([gradient.flatten() for gradient in kept]), stats.losses


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiling", [False, True])
def test_packed_and_compiled_gradients_are_those_of_padded_rows(
    compiling, checkpointing, monkeypatch
) -> None:
    expected, loss = gradients(checkpointing, False, monkeypatch)
    found, packed_loss = gradients(checkpointing, True, monkeypatch, compiling)
    assert packed_loss == pytest.approx(loss, abs=0.05)
    cosine = torch.nn.functional.cosine_similarity(found, expected, dim=0)
    assert cosine > 0.995  # 16 bits; one sequence that saw another's would be far below
    assert found.norm().item() == pytest.approx(expected.norm().item(), rel=0.05)


@pytest.mark.parametrize("compiling", [False, True])
def test_micro_batches_are_handed_to_the_gpu_without_waiting_for_it(compiling, monkeypatch) -> None:
    settings = LearningSettings(micro_batch_tokens=100, compile=compiling)
    learner = Learner(agent_of(torch.bfloat16), make_method(GspoSettings()), settings, Sampling(64))
    given = [sample(i, length) for i, length in enumerate((40, 3, 17, 29, 8, 30))]
    learner.learn(given, 1, 0)  # whatever is tried once has been tried
    record, read = LearnStats.record, []

    def reading(stats: LearnStats, result: MicroBatchResult) -> float:
        read.append(result)
        return record(stats, result)

    def clipping(most: float) -> float:
        torch.cuda.set_sync_debug_mode("default")
        return clip(most)

    clip = learner.optimizer.clip_gradients
    monkeypatch.setattr(LearnStats, "record", reading)
    monkeypatch.setattr(learner.optimizer, "clip_gradients", clipping)
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.learn(given, 1, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(result.samples) for result in read] == [2, 4]  # 45 + 35, 34 + 22 + 13 + 8 tokens


def test_reading_does_not_wait_for_what_the_gpu_was_asked_later() -> None:
    numbers = torch.arange(5, device="cuda")
    download = HostCopy(numbers * 2, numbers.sum())
    torch.cuda._sleep(2_000_000_000)  # a second
    later = torch.cuda.Event()
    later.record()
    doubled, total = download.wait()
    assert not later.query()  # the GPU is at it still
    assert (doubled.tolist(), total.item()) == ([0, 2, 4, 6, 8], 10)


def by_place(some: Sequence[FinishedRequest]) -> dict[int, SampledTokens]:
    return {request.index: said for request, said in some}


@torch.inference_mode()
def test_decoding_waits_only_for_who_has_ended() -> None:
    """Responses begin and end all the time; their words come and go beside the steps of the others."""
    agent = agent_of(torch.bfloat16)
    prompts = [tuple(agent.encode_prompt(problem)) for problem in PROBLEMS]
    requests = [Request(place, prompts[place // 4], 3 + 5 * (place % 4)) for place in range(20)]
    decoder = SlotDecoder(agent.model, 6, 64, Sampling(24), [1])
    said: list[dict[int, SampledTokens]] = []
    for mode in ("default", "error"):  # whatever is tried once has been tried the first time
        ended: dict[int, SampledTokens] = {}
        torch.cuda.set_sync_debug_mode(mode)
        try:
            decode_all(decoder, requests, 1, lambda some, ended=ended: ended.update(by_place(some)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        said.append(ended)
    assert said[0].keys() == said[1].keys() == set(range(20))
    assert all(said[0][place].token_ids == said[1][place].token_ids for place in range(20))


def test_packed_logprobs_in_16_bits_are_as_near_to_the_truth_as_padded_ones() -> None:
    agent, exact = agent_of(torch.bfloat16), agent_of(torch.bfloat16)
    exact.model.to(torch.float32)
    pairs = [(sample(i, n).prompt_ids, sample(i, n).response_ids) for i, n in enumerate((40, 3, 17, 29))]
    given = pairs, Sampling(64), torch.device("cuda")
    with torch.no_grad():
        truth = padded_logprobs(exact.model, *given)
        padded = (padded_logprobs(agent.model, *given) - truth).abs().sum()
        packed = (packed_logprobs(agent.model, *given) - truth).abs().sum()
    assert packed < 1.5 * padded + 0.1


@pytest.mark.parametrize("window", [-1, 0, 5, 70])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 8, 128), (12, 2, 64), (8, 8, 64)])
def test_the_decode_kernel_is_plain_attention(heads, key_heads, width, window) -> None:
    from hacrl.engines.hf.decode_kernel import can_decode, decode_attention

    torch.manual_seed(0)
    rows, slots, length = 300, 310, 200
    keys, values = (torch.randn(slots, length, key_heads, width, device="cuda").bfloat16() for _ in "kv")
    query = torch.randn(1, heads, rows, width, device="cuda").bfloat16().squeeze(0).transpose(0, 1)
    places = torch.randperm(slots, device="cuda")[:rows]
    used = torch.randint(1, length + 1, (rows,), device="cuda", dtype=torch.int32)
    assert can_decode(query, key_heads)
    key, value = (
        torch.randn(1, key_heads, rows, width, device="cuda").bfloat16()[0].transpose(0, 1) for _ in "kv"
    )
    hosts, shared = places.clone(), torch.zeros_like(used, dtype=torch.long)
    for row in range(0, rows, 3):  # of every three slots, the second begins like the first, read from there
        tokens = min(row, int(used[row + 1]) - 1, int(used[row]) - 1)
        for states in (keys, values):
            states[places[row + 1], :tokens] = states[places[row], :tokens]
        hosts[row + 1], shared[row + 1] = places[row], tokens
    before = keys.clone()
    found = decode_attention(
        query, key, value, keys, values, places, hosts, shared, used, 0.11, window
    ).float()
    for states, new in ((keys, key), (values, value)):  # written to where they belong ...
        assert torch.equal(states[places, used.long() - 1], new)
    assert int((keys != before).any(dim=-1).any(dim=-1).sum()) == rows  # ... and nowhere else
    columns = torch.arange(length, device="cuda")
    seen = columns < used.unsqueeze(1)
    if window >= 0:
        seen &= columns >= used.unsqueeze(1) - 1 - window
    shared = [states[places].float().repeat_interleave(heads // key_heads, 2) for states in (keys, values)]
    scores = torch.einsum("nhd,nlhd->nhl", query.float(), shared[0]) * 0.11
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    expected = torch.einsum("nhl,nlhd->nhd", weights, shared[1])
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_the_kernel_that_adds_up_gradients_of_shared_prompts() -> None:
    from hacrl.models.attention.key_copies import copied_keys, plan_key_copies

    generator = torch.Generator().manual_seed(0)
    places = torch.cat([torch.arange(1000), torch.randint(0, 300, (5000,), generator=generator)])
    shared = plan_key_copies(places, 1000, torch.device("cuda", 0))
    assert shared.order is not None  # the kernel was tried, and is right
    states = torch.randn(1000, 8, 128, device="cuda").bfloat16().requires_grad_()
    weights = torch.randn(6000, 8, 128, device="cuda").bfloat16()
    (copied_keys(states, shared) * weights).sum().backward()
    expected = torch.zeros(1000, 8, 128, device="cuda").index_add_(0, shared.tokens, weights.float())
    torch.testing.assert_close(states.grad.float(), expected, rtol=0.01, atol=0.01)
