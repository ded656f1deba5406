"""Attention of a decoding step over vLLM's pages: our kernel against vLLM's FlashAttention 3.

    python benchmarks/paged_attention.py
    python benchmarks/paged_attention.py --tune 8   # programs with 8 responses: blocks, warps, stages

In bfloat16, heads 128 wide, responses to prompts of 160 tokens whose pages they share; microseconds a layer,
of the fastest of 5 replays of a graph with 6 layers that have caches of their own. Ours with one response in
a program, and with as many as fit; the bytes of all pages, each read once, at the speed of a large copy.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from timing import copy_bandwidth, recorded
from torch import Tensor

from hacrl.rollout.vllm import paged_attention as ours
from hacrl.rollout.vllm.paged_attention import Way, paged_attention

GPU = torch.device("cuda")
PAGE, WIDTH, PROMPT, LAYERS = 16, 128, 160, 6
SCALE = WIDTH**-0.5
_DRAW = random.Random(0)
HEADS = ((16, 8), (32, 8), (12, 2))  # of queries, and of keys
CASES = {  # tokens of context of every response
    "256 responses, 176 tokens": [176] * 256,
    "256 responses, 300 tokens": [300] * 256,
    "256 responses, 420 tokens": [420] * 256,
    "256 responses, 200 to 4,000 tokens": [_DRAW.randint(200, 4000) for _ in range(256)],
    "128 responses, 2,000 tokens": [2000] * 128,
    "64 responses, 300 tokens": [300] * 64,
    "64 responses, 2,000 tokens": [2000] * 64,
    "64 responses, 200 to 8,000 tokens": [_DRAW.randint(200, 8000) for _ in range(64)],
    "64 responses, one of 16,000 tokens, others of 500": [16000] + [500] * 63,
}


def main() -> None:
    """Compare, or try other ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", type=int, nargs="+", metavar="RESPONSES", help="of a program")
    groups = parser.parse_args().tune
    if groups:
        for group in groups:
            tune(group)
    else:
        compare_all()


def tune(group: int) -> None:
    """Microseconds a layer of 256 responses, for 3 lengths of context; the fastest in all is printed last."""
    lengths = (176, 300, 420)
    found = []
    for block, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3)):
        ours.WAY = Way(block, warps, stages)
        try:
            times = [in_groups([length] * 256, *HEADS[0], group) for length in lengths]
        except Exception as error:  # more shared memory than there is, say
            print(group, block, warps, stages, type(error).__name__, flush=True)
            continue
        found.append((sum(times), group, ours.WAY))
        print(group, block, warps, stages, *(f"{spent:7.1f}" for spent in times), flush=True)
    print(min(found), flush=True)


def in_groups(lengths: list[int], heads: int, key_heads: int, group: int) -> float:
    """Microseconds a layer, with 8 responses to a prompt and so many in a program."""
    pages, count = page_tables(lengths, 8, 0)
    shape = (count, 2, PAGE, key_heads, WIDTH)
    caches = [torch.randn(shape, device=GPU, dtype=torch.bfloat16) for _ in range(LAYERS)]
    query = torch.randn(len(lengths), heads, WIDTH, device=GPU, dtype=torch.bfloat16)
    used, out = torch.tensor(lengths, dtype=torch.int32, device=GPU), torch.empty_like(query)
    return microseconds(
        lambda cache: paged_attention(query, *cache.unbind(1), pages, used, SCALE, out, group), caches
    )


def compare_all() -> None:
    """Every case with every kind of heads, then responses to prompts that do not begin where a group does."""
    bandwidth = copy_bandwidth()
    titles = f"{'FlashAttention':>15} {'alone':>7} {'groups':>7} {'ratio':>6} {'bytes':>7} gap"
    print(f"{'':52} {'heads':>8} {titles}")
    cases = [(name, lengths, kind, 8, 0) for name, lengths in CASES.items() for kind in HEADS]
    cases += [
        ("256 responses, 300 tokens, others first", [300] * 256, HEADS[0], 8, 4),
        ("256 responses, 300 tokens, 5 to a prompt", [300] * 256, HEADS[0], 5, 0),
        ("256 responses, 300 tokens, 1 to a prompt", [300] * 256, HEADS[0], 1, 0),
    ]
    for name, lengths, (heads, key_heads), samples, others in cases:
        found = compare(lengths, heads, key_heads, samples, others)
        floor = found.bytes / bandwidth * 1e6
        line = (
            f"{found.theirs:15.1f} {found.alone:7.1f} {found.groups:7.1f} {found.theirs / found.groups:6.2f}"
        )
        print(f"{name:52} {f'{heads}, {key_heads}':>8} {line} {floor:7.1f} {found.gap:.4f}", flush=True)


class Found(NamedTuple):
    """Microseconds a layer, bytes of all pages, and how far results are apart at most."""

    theirs: float
    alone: float
    groups: float
    bytes: int
    gap: float


def compare(lengths: list[int], heads: int, key_heads: int, samples: int, others: int) -> Found:
    """FlashAttention and our kernel on the same pages."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    pages, count = page_tables(lengths, samples, others)
    caches = [
        torch.randn(count, 2, PAGE, key_heads, WIDTH, device=GPU, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    rows, longest = len(lengths), max(lengths)
    query = torch.randn(rows, heads, WIDTH, device=GPU, dtype=torch.bfloat16)
    found, theirs = torch.empty_like(query), torch.empty_like(query)
    used = torch.tensor(lengths, dtype=torch.int32, device=GPU)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=GPU)
    common = {"cu_seqlens_q": starts, "max_seqlen_q": 1, "max_seqlen_k": longest, "num_splits": 32}
    common |= {"causal": True, "window_size": [-1, -1]}  # and as many splits as vLLM allows in graphs
    plan = get_scheduler_metadata(
        batch_size=rows,
        num_heads_q=heads,
        num_heads_kv=key_heads,
        headdim=WIDTH,
        cache_seqlens=used,
        qkv_dtype=query.dtype,
        page_size=PAGE,
        **common,
    )

    def flash(cache: Tensor) -> None:
        keys, values = cache.unbind(1)
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=theirs,
            seqused_k=used,
            softmax_scale=SCALE,
            block_table=pages,
            scheduler_metadata=plan,
            fa_version=3,
            **common,
        )

    def own(group: int | None, cache: Tensor) -> None:
        paged_attention(query, *cache.unbind(1), pages, used, SCALE, found, group)

    times = [microseconds(layer, caches) for layer in (flash, partial(own, 1), partial(own, None))]
    read = len(pages.unique()) * caches[0][0].nbytes
    return Found(*times, read, float((found.float() - theirs.float()).abs().max()))


def page_tables(lengths: list[int], samples: int, others: int) -> tuple[Tensor, int]:
    """Pages of every response, scattered; how many there are.

    The first ``others`` have prompts of their own, then ``samples`` at a time share theirs.
    """
    wanted = [-(-length // PAGE) for length in lengths]
    shared = PROMPT // PAGE
    count = sum(wanted) + 1
    free = list(range(1, count))
    random.Random(0).shuffle(free)
    rows = []
    for place, pages in enumerate(wanted):
        if place < others or (place - others) % samples == 0:
            prompt = [free.pop() for _ in range(shared)]
        own = [free.pop() for _ in range(pages - shared)]
        rows.append([*prompt, *own, *[0] * (max(wanted) - pages)])
    return torch.tensor(rows, dtype=torch.int32, device=GPU), count


def microseconds(layer: Callable[[Tensor], None], caches: list[Tensor]) -> float:
    """Of one layer, in a recorded graph."""
    return recorded([partial(layer, cache) for cache in caches]) / LAYERS * 1e6


if __name__ == "__main__":
    main()
