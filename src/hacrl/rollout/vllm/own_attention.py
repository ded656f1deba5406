"""vLLM's FlashAttention with a kernel of ours where every response gets one token."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hacrl.rollout.vllm.shortcuts import is_known

# Of flash_attn_varlen_func's arguments: those that the kernel needs, and those that change nothing where a
# response has one query and keys are not quantised. Any other must say that it is not used.
NEEDED = (
    *("q", "k", "v", "out", "softmax_scale"),
    *("block_table", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
)
WITHOUT_EFFECT = (
    *("cu_seqlens_q", "causal", "deterministic", "scheduler_metadata", "num_splits"),
    *("fa_version", "q_descale", "k_descale", "v_descale"),
)
EVERYWHERE = ([-1, -1], (-1, -1))  # a window that is none
MEASURED_ON = (9, 0)  # the kind of GPU on which the kernel was the faster one
# Arguments of vLLM's with which a batch of one token each may stand for others: with cudagraph_mode FULL,
# vLLM 0.25 records such a batch and replays it for prompts as well. FlashAttention looks again where queries
# begin, our kernel does not.
LEFT_TO_VLLM = ("attention_config", "compilation_config", "speculative_config")


def take_over_decoding(version: str, engine_args: Mapping[str, Any]) -> bool:
    """Put the kernel in front of FlashAttention in this process, before vLLM records graphs."""
    must_not_depend_on_batches = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
    is_told_otherwise = any(engine_args.get(key) is not None for key in LEFT_TO_VLLM)
    if must_not_depend_on_batches or is_told_otherwise or not is_known(version):
        return False
    try:
        from vllm.platforms import current_platform as platform

        # torch would begin to use the GPU here, and vLLM with several GPUs would have to do without forks
        if not (platform.is_cuda() and platform.is_device_capability(MEASURED_ON)):
            return False
        from vllm.v1.attention.backends import flash_attn

        flash_attn.flash_attn_varlen_func = with_own_kernel(flash_attn.flash_attn_varlen_func)
    except (ImportError, AttributeError):  # vLLM without FlashAttention, or no Triton
        return False
    return True


def with_own_kernel(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """FlashAttention's function: decoding is ours where the kernel fits and is right, the rest theirs."""
    from hacrl.rollout.vllm.paged_attention import can_attend, is_right, paged_attention, responses_together

    found: dict[tuple[Any, ...], bool] = {}  # whether it is right, by shape

    def is_usable(query: Tensor, keys: Tensor) -> bool:
        (rows, heads, width), (page, key_heads) = query.shape, keys.shape[1:3]
        shared = heads // key_heads
        group = responses_together(shared, rows * key_heads)
        shape = (query.device, query.dtype, shared, width, page, group)
        if shape not in found:
            # nothing can be tried while a graph is recorded; vLLM computes every batch once before that
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            found[shape] = is_right(*shape)
        return found[shape]

    def attention(*positional: Any, **named: Any) -> Any:
        if positional or not is_plain_decoding(named):
            return theirs(*positional, **named)
        query, keys, values, out = (named[key] for key in ("q", "k", "v", "out"))
        pages, lengths = named["block_table"], named["seqused_k"]
        longest = named["max_seqlen_k"]  # of this batch; where a graph is recorded, of any to come
        if not can_attend(query, keys, values, pages, lengths, out, longest) or not is_usable(query, keys):
            return theirs(**named)
        paged_attention(query, keys, values, pages, lengths, named["softmax_scale"], out)
        return out

    return attention


def is_plain_decoding(named: Mapping[str, Any]) -> bool:
    """One query a response over all before it, and nothing that the kernel does not know of."""
    others = {key: value for key, value in named.items() if key not in (*NEEDED, *WITHOUT_EFFECT)}
    if others.pop("window_size", None) not in (None, *EVERYWHERE):
        return False
    return (
        all(named.get(key) is not None for key in NEEDED)
        and named["max_seqlen_q"] == 1
        and isinstance(named.get("causal"), bool)  # and not one for each response
        and all(value is None or (isinstance(value, int | float) and value == 0) for value in others.values())
    )
