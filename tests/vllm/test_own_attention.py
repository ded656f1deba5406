"""Our kernel in front of vLLM's FlashAttention: where it is used, and that it is asked for the same."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hacrl.rollout.vllm import child_program, own_attention
from hacrl.rollout.vllm.own_attention import NEEDED, WITHOUT_EFFECT, is_plain_decoding, take_over_decoding
from tests.support.interpreted import interpreted
from tests.vllm.marks import IN_VLLM
from tests.vllm.test_paged_attention import SHARED

IN_FRONT = (
    SHARED
    + """
paged_attention.ENOUGH_PAIRS, paged_attention.ENOUGH_PROGRAMS = 8, 4
rows, heads, key_heads, width = 4, 4, 2, 64
(keys, values), _ = caches(9, 16, key_heads, width)
went_on = []


def theirs(*positional, **named):
    went_on.append(named.get("max_seqlen_q"))
    return named["out"].fill_(7.0)


def asked(attend, rows=rows, **others):
    '''What is written for so many responses, and whether FlashAttention did it.'''
    went_on.clear()
    query = torch.randn(rows, heads, width, generator=torch.Generator().manual_seed(1)).half()
    pages = torch.arange(2 * rows).view(rows, 2).int() % 9
    lengths = torch.arange(14, 14 + rows).int()
    named = dict(q=query, k=keys, v=values, out=torch.zeros_like(query), max_seqlen_q=1, max_seqlen_k=40)
    named |= dict(seqused_k=lengths, block_table=pages, softmax_scale=0.3, causal=True, softcap=0)
    named |= dict(window_size=[-1, -1], alibi_slopes=None, num_splits=32, k_descale=torch.ones(rows, 2))
    named |= others
    out = attend(**named)
    assert out is named["out"]
    if not went_on:
        for row, length in enumerate(lengths.tolist()):
            exact = by_torch(named["q"][row], keys, values, pages[row], length, 0.3)
            torch.testing.assert_close(out[row].float(), exact, rtol=2e-3, atol=2e-3)
    return bool(went_on)


attend = with_own_kernel(theirs)
assert not asked(attend)
assert not asked(attend, causal=False, window_size=(-1, -1), s_aux=None)  # the last query sees all before it
assert asked(attend, max_seqlen_q=2)  # prompts
assert asked(attend, softcap=30.0) and asked(attend, window_size=[15, 0])
assert asked(attend, s_aux=torch.ones(4))
assert not asked(attend, max_seqlen_k=1024) and asked(attend, max_seqlen_k=1025)  # long contexts
assert asked(attend, rows=3)  # 6 pairs: FlashAttention splits long responses
assert asked(attend, block_table=torch.zeros(5, 2).int())  # not a row for each query
assert asked(attend, k=keys.float()) and asked(attend, something_new=True)
assert asked(attend, v=torch.zeros(9, 16, key_heads, 2 * width).half())  # wider than keys
assert asked(attend, out=torch.zeros(rows, heads, 2 * width).half()[..., ::2])  # not side by side
assert asked(attend, out=torch.zeros(rows, heads * width).half())  # nor by heads
assert asked(attend, out=torch.zeros(rows, heads, width))
assert asked(attend, seqused_k=torch.full((2 * rows,), 14).int()[::2])

paged_attention.paged_attention = lambda *given: given[-1].zero_()  # as a compiler might get it wrong
assert asked(with_own_kernel(theirs))


def fails(*given):
    raise RuntimeError("no such instruction")


paged_attention.paged_attention = fails
assert asked(with_own_kernel(theirs))
print("all the same")
"""
)


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
def test_decoding_is_attention() -> None:
    interpreted(IN_FRONT)


PLAIN = dict.fromkeys(NEEDED, 1) | {"causal": True, "window_size": [-1, -1], "softcap": 0, "s_aux": None}


@pytest.mark.parametrize(
    ("change", "is_plain"),
    [
        ({}, True),
        ({"num_splits": 32, "scheduler_metadata": object(), "window_size": None}, True),
        ({"window_size": [1023, 0]}, False),
        ({"max_seqlen_q": 2}, False),
        ({"block_table": None}, False),
        ({"out": None}, False),
        ({"causal": torch.tensor([True])}, False),
        ({"softcap": 30.0}, False),
        ({"alibi_slopes": torch.ones(2)}, False),
        ({"return_softmax_lse": True}, False),
        ({"return_softmax_lse": False}, True),
        ({"mask_mod": print}, False),
    ],
)
def test_what_the_kernel_takes_over(change, is_plain) -> None:
    assert is_plain_decoding({**PLAIN, **change}) is is_plain


class Platform:
    """A GPU, as vLLM describes it."""

    maker, capability = "nvidia", (9, 0)

    def is_cuda(self) -> bool:
        return self.maker == "nvidia"

    def is_device_capability(self, capability: tuple[int, int]) -> bool:
        return self.capability == capability


class TestWhereItIsUsed:
    @pytest.fixture(autouse=True)
    def flash(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The part of a vLLM with FlashAttention; what is put in front of it is its name."""
        names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.platforms")
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        flash = ModuleType("flash_attn")
        flash.flash_attn_varlen_func = "theirs"
        sys.modules["vllm.v1.attention.backends"].flash_attn = flash
        sys.modules["vllm.platforms"].current_platform = Platform()
        monkeypatch.setattr(own_attention, "with_own_kernel", lambda theirs: f"ours before {theirs}")
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
        return flash

    @pytest.mark.parametrize("version", ["0.25.1", "0.32.0"])
    @pytest.mark.parametrize("batch_invariant", ["", "0"])
    def test_in_front_of_flash_attention(self, flash, monkeypatch, version, batch_invariant) -> None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", batch_invariant)
        assert take_over_decoding(version, {"model": "/m", "compilation_config": None})
        assert flash.flash_attn_varlen_func == "ours before theirs"

    def test_not_without_flash_attention(self, flash) -> None:
        del flash.flash_attn_varlen_func
        assert not take_over_decoding("0.32.0", {})

    def test_not_without_vllm(self, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm.platforms", None)
        assert not take_over_decoding("0.32.0", {})

    @pytest.mark.parametrize(("maker", "capability"), [("nvidia", (8, 0)), ("nvidia", None), ("amd", (9, 0))])
    def test_not_on_another_kind_of_gpu_or_without_one(self, flash, monkeypatch, maker, capability) -> None:
        monkeypatch.setattr(Platform, "maker", maker)
        monkeypatch.setattr(Platform, "capability", capability)
        assert not take_over_decoding("0.32.0", {})
        assert flash.flash_attn_varlen_func == "theirs"

    def test_not_where_results_must_not_depend_on_batches(self, flash, monkeypatch) -> None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert not take_over_decoding("0.32.0", {})
        assert flash.flash_attn_varlen_func == "theirs"

    @pytest.mark.parametrize(
        "said",
        [
            {"compilation_config": {"cudagraph_mode": "FULL"}},  # one graph for prompts and decoding
            {"compilation_config": 0},
            {"attention_config": {"flash_attn_version": 2}},
            {"speculative_config": {"method": "ngram"}},
        ],
    )
    def test_not_if_a_user_says_what_vllm_shall_do_there(self, flash, said) -> None:
        assert not take_over_decoding("0.25.1", said)
        assert flash.flash_attn_varlen_func == "theirs"

    @pytest.mark.parametrize("version", ["0.24.0", "0.33.0", "0.99.0"])
    def test_not_in_a_vllm_that_nobody_has_read(self, flash, version) -> None:
        assert not take_over_decoding(version, {})
        assert flash.flash_attn_varlen_func == "theirs"

    @pytest.mark.parametrize("shortcuts", [True, False])
    def test_a_child_has_its_kernels_there_before_vllm_is_made(self, monkeypatch, shortcuts) -> None:
        done = []

        def made(**arguments) -> None:
            done.append("made")
            raise RuntimeError("that is enough")

        monkeypatch.setattr(sys.modules["vllm"], "LLM", made, raising=False)
        monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.0", raising=False)
        monkeypatch.setattr(child_program, "take_over_decoding", lambda *told: done.append(told))
        monkeypatch.setattr(child_program, "take_over_logprobs", done.append)
        with pytest.raises(RuntimeError, match="enough"):
            child_program.Engine({"model": "/m"}, "worker", shortcuts)
        assert done == [*([("0.32.0", {"model": "/m"}), "0.32.0"] if shortcuts else []), "made"]


def _defined(where: ast.AST, name: str) -> ast.AST:
    return next(node for node in ast.iter_child_nodes(where) if getattr(node, "name", None) == name)


class TestVllmItself:
    pytestmark = IN_VLLM

    def test_its_function_is_called_as_expected(self) -> None:
        """By names that are known, from the place where it is replaced."""
        from vllm.v1.attention.backends import flash_attn

        module = ast.parse(Path(flash_attn.__file__).read_text())
        forward = _defined(_defined(module, "FlashAttentionImpl"), "forward")
        calls = [
            node
            for node in ast.walk(forward)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("flash_attn_varlen_func", "_FA4_DENSE_ATTENTION_KERNEL")
        ]
        assert len(calls) == 1
        named = {keyword.arg for keyword in calls[0].keywords}
        assert not calls[0].args
        assert set(NEEDED) <= named
        unused = {"alibi_slopes", "softcap", "s_aux", "mask_mod", "aux_tensors", "dynamic_causal"}
        assert named - set(NEEDED) - set(WITHOUT_EFFECT) == unused | {"window_size"}
