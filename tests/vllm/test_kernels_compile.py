"""Kernels of ours in vLLM, compiled for GPUs that are not here: an interpreter takes more than a compiler."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.triton
HOPPER, AMPERE = 90, 80  # compute capabilities


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, int], capability: int, warps: int
) -> Any:
    """What a kernel becomes whose numbers and addresses are multiples of 16, as vLLM's are."""
    pytest.importorskip("triton.backends.nvidia")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    whole = [place for place, kind in enumerate(types.values()) if kind.startswith("*") or kind == "i32"]
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        {(place,): [["tt.divisibility", 16]] for place in whole},
    )
    options = {"num_warps": warps, "num_stages": 3}
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return made.asm


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
@pytest.mark.parametrize(("shared", "width"), [(2, 128), (4, 128), (1, 64), (7, 64), (16, 128)])
def test_attention_is_pipelined_matrix_products(shared, width, capability) -> None:
    pytest.importorskip("triton")
    from hacrl.rollout.vllm.paged_attention import LEAST_QUERIES, WAY, responses_together
    from hacrl.rollout.vllm.paged_kernels import attend

    group = responses_together(shared, 10**6)
    tensors = dict.fromkeys(("query", "keys", "values", "out"), "*bf16")
    strides = ("query_row", "query_head", "key_page", "key_token", "key_head")
    strides += ("value_page", "value_token", "value_head", "out_row", "out_head", "pages_row")
    types = tensors | {"pages": "*i32", "lengths": "*i32", "scale": "fp32", "rows": "i32"}
    sizes = {"SHARED": shared, "QUERIES": LEAST_QUERIES, "GROUP": group, "WIDTH": width}
    sizes |= {"PAGE": 16, "MOST_PAGES": 64, "BLOCK": WAY.block}
    made = compiled(attend, types | dict.fromkeys(strides, "i32"), sizes, capability, WAY.warps)
    assert "mma.sync" in made["ptx"]
    assert "cp.async.cg.shared.global" in made["ptx"]  # 16 bytes a thread, past its registers
    # keys and values of two blocks are on their way while a third is looked at
    assert f"memdesc<2x{WAY.block}x{width}xbf16" in made["ttgir"]
    assert f"memdesc<1x{WAY.block}x{width}xbf16" not in made["ttgir"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
def test_logits_are_read_16_bytes_at_a_time(dtype, capability) -> None:
    pytest.importorskip("triton")
    from hacrl.rollout.vllm import drawn_logprobs as ours

    given = {"logits": dtype, "tokens": "*i64", "noted": "*fp32"}
    sizes = {"NOTED": ours.NOTED, "PIECE": ours.PIECE}
    types = given | {"logits_row": "i32", "vocabulary": "i32"}
    made = compiled(ours._look_at_a_piece, types, sizes, capability, ours.WARPS)
    assert "ld.global.v4.b32" in made["ptx"]
    results = {"logprobs": "*fp32", "ranks": "*i64", "logits_row": "i32", "pieces": "i32"}
    sizes = {"NOTED": ours.NOTED, "PIECES": 32}
    assert compiled(ours._put_together, given | results, sizes, capability, 1)
