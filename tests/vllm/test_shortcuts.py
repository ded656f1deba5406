"""vLLM's schedulers decide the same with shortcuts as without, step by step; no model is needed.

Needs an environment that has vLLM: ``python -m pytest tests/vllm -m vllm_installed`` there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hacrl.rollout.vllm.shortcuts import is_known, take_shortcuts
from tests.vllm.marks import IN_VLLM

pytestmark = IN_VLLM
BLOCK, LONGEST, STOP = 4, 40, 7  # tokens of a block, of a prompt and its response; the token that ends one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig

    folder: Path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def _one_beginning() -> None:
    """Of all chains of blocks. vLLM 0.25 draws another one whenever it is asked: nothing is shared then."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(get_hash_fn_by_name("sha256"))


def scheduler(model: str, runs_ahead: bool, blocks: int, sliding: int | None = None) -> Any:
    """One with so many blocks of keys and values. Ahead: it plans before it knows the last tokens."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=LONGEST, max_model_len=LONGEST, is_encoder_decoder=False
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = runs_ahead
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    kind = (
        FullAttentionSpec(**shape) if sliding is None else SlidingWindowSpec(**shape, sliding_window=sliding)
    )
    return (AsyncScheduler if runs_ahead else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], kind)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def request(name: str, draw: random.Random) -> Any:
    """Prompts that share beginnings of 8 tokens, of every length within a block."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    from vllm import SamplingParams

    beginning = [10 + draw.randrange(3)] * 2 * BLOCK
    return Request(
        request_id=name,
        prompt_token_ids=beginning + [20 + draw.randrange(30) for _ in range(draw.randrange(1, 12))],
        sampling_params=SamplingParams(
            temperature=1.0, max_tokens=draw.randrange(1, 25), logprobs=0, stop_token_ids=[STOP]
        ),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256")),
    )


def decisions(made: Any, runs_ahead: bool, seed: int) -> Iterator[Any]:
    """Of a scheduler that requests come to and leave again: each plan, and what it made of the tokens."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    draw, planned = random.Random(seed), []
    for step in range(150):
        if step < 100 and draw.random() < 0.4:
            made.add_request(request(f"{step}", draw))
        if made.running and draw.random() < 0.03:
            made.finish_requests(draw.choice(made.running).request_id, RequestStatus.FINISHED_ABORTED)
        if step % 40 == 39 and not made.running and not planned:
            yield made.reset_prefix_cache()
        plan = made.schedule()
        yield seen(plan)
        planned.append(plan)
        while planned and (len(planned) > runs_ahead or not planned[0].total_num_scheduled_tokens):
            plan = planned.pop(0)
            if not plan.total_num_scheduled_tokens:
                continue
            names = list(plan.num_scheduled_tokens)
            tokens = [
                [draw.choice((STOP, *range(8, 40)))] if ended(made, plan, name) else [] for name in names
            ]
            count = len(names)
            logprobs = LogprobsLists(
                np.zeros((count, 1), np.int64), np.zeros((count, 1), np.float32), np.zeros(count, np.int64)
            )
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs_dict={},
                pooler_output=None,
            )
            found = made.update_from_output(plan, output)
            yield [
                (one.request_id, list(one.new_token_ids), str(one.finish_reason), one.stop_reason)
                for outputs in found.values()
                for one in outputs.outputs
            ]
        pool = made.kv_cache_manager.block_pool
        yield pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)


def ended(made: Any, plan: Any, name: str) -> bool:
    """Whether the request's prompt is done with this step: then there is a token."""
    one = made.requests.get(name)
    if one is None:
        return True
    cached = plan.scheduled_cached_reqs
    new = {item.req_id: item.num_computed_tokens for item in plan.scheduled_new_reqs}
    before = {**new, **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))}[name]
    return before + plan.num_scheduled_tokens[name] >= one.num_prompt_tokens


def seen(plan: Any) -> Any:
    """What a model runner is told."""
    new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in plan.scheduled_new_reqs]
    others = (plan.num_scheduled_tokens, plan.finished_req_ids, plan.preempted_req_ids)
    return new, asdict(plan.scheduled_cached_reqs), *others, plan.num_common_prefix_blocks


def questions(made: Any) -> list[str]:
    """For which requests a scheduler asks vLLM's own code for slots, from now on."""
    asked: list[str] = []
    own = made.kv_cache_manager.allocate_slots

    def allocate_slots(one: Any, *others: Any, **named: Any) -> Any:
        asked.append(one.request_id)
        return own(one, *others, **named)

    made.kv_cache_manager.allocate_slots = allocate_slots
    return asked


@pytest.mark.parametrize("blocks", [200, 26, 14], ids=["room", "little", "least"])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("seed", range(3))
def test_every_decision_is_the_same(model: str, blocks: int, runs_ahead: bool, seed: int) -> None:
    """With few blocks, responses are put off and begun again, and blocks that could be shared are reused."""
    import vllm

    plain, short = (scheduler(model, runs_ahead, blocks) for _ in range(2))
    all_asked, fewer_asked = questions(plain), questions(short)
    assert take_shortcuts(short, vllm.__version__)
    expected = list(decisions(plain, runs_ahead, seed))
    for number, (found, wanted) in enumerate(zip(decisions(short, runs_ahead, seed), expected, strict=True)):
        assert found == wanted, number
    assert len(fewer_asked) < 0.75 * len(all_asked)
    finished = [one for part in expected if isinstance(part, list) for one in part if one[2] != "None"]
    assert len(finished) > 10
    plans = [part for part in expected if isinstance(part, tuple) and len(part) == 6]
    began_with_others_blocks = [name for new, *_ in plans for name, _, computed in new if computed]
    assert len(began_with_others_blocks) > 5
    put_off = any(plan[4] for plan in plans)
    assert put_off == (blocks < 30)


def test_whatever_else_is_asked_for_is_left_to_vllm(model: str) -> None:
    """Several tokens at a time, or room for tokens that are only guessed."""
    import vllm

    made = scheduler(model, False, 200)
    assert take_shortcuts(made, vllm.__version__)
    one = request("one", random.Random(0))
    made.add_request(one)
    made.schedule()
    manager, place = made.kv_cache_manager, one.num_computed_tokens
    while place % BLOCK != 2:  # two slots of its last block are free
        assert manager.allocate_slots(one, 1) is not None
        one.num_computed_tokens = place = place + 1
        one.append_output_token_ids(9)
    manager.cache_blocks(one, place)
    asked = questions(made)
    assert blocks_of(manager.allocate_slots(one, 1)) == 0
    assert blocks_of(manager.allocate_slots(one, 3)) == 1
    assert blocks_of(manager.allocate_slots(one, 1, num_lookahead_tokens=10)) == 2
    assert asked == ["one"] * 3


def blocks_of(found: Any) -> int:
    (blocks,) = found.blocks
    return len(blocks)


def test_other_ways_with_blocks_are_left_to_vllm(model: str) -> None:
    import vllm

    made = scheduler(model, False, 50, sliding=8)
    own = made.kv_cache_manager.allocate_slots
    assert not take_shortcuts(made, vllm.__version__)
    assert made.kv_cache_manager.allocate_slots == own
    connected = scheduler(model, False, 50)
    connected.connector = object()  # keys and values come from elsewhere
    assert not take_shortcuts(connected, vllm.__version__)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.24.9", False),
        ("0.25.1", True),
        ("0.32.0+cpu", True),
        ("0.33.0", False),
        ("1.0.0", False),
        ("0.30.1.dev5+g1234", True),
        ("dev", False),
    ],
)
def test_only_versions_that_were_read(model: str, version: str, known: bool) -> None:
    assert is_known(version) is known
    assert take_shortcuts(scheduler(model, False, 50), version) is known
