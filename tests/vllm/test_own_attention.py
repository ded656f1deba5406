"""Decoding's attention in vLLM by our kernel, run by Triton's interpreter: numbers without a GPU."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hacrl.rollout.vllm import child_program, own_attention
from hacrl.rollout.vllm.own_attention import NEEDED, WITHOUT_EFFECT, is_plain_decoding, take_over_decoding
from tests.support.interpreted import interpreted

IN_VLLM = [
    pytest.mark.vllm_installed,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here (make test-vllm)"),
    pytest.mark.filterwarnings("ignore"),  # importing vllm warns of much
]
SHARED = """
import torch
from hacrl.rollout.vllm import paged_attention, paged_kernels
from hacrl.rollout.vllm.own_attention import with_own_kernel

torch.manual_seed(0)


def caches(pages, page, heads, width):
    '''Keys and values as vLLM 0.25 and 0.32 lay them.'''
    either = torch.randn(pages, 2, page, heads, width).half()
    beside = torch.randn(pages, heads, page, 2 * width).half()
    return [either.unbind(1), beside.transpose(1, 2).split(width, dim=-1)]


def by_torch(query, keys, values, pages, length, scale):
    '''One response, by torch's own function.'''
    seen = [part[pages.long()].flatten(0, 1)[:length].transpose(0, 1).float() for part in (keys, values)]
    return torch.nn.functional.scaled_dot_product_attention(
        query.float()[:, None], *seen, scale=scale, enable_gqa=True
    )[:, 0]
"""
KERNEL = (
    SHARED
    + """
# by hand: one token's value; the mean of two whose keys are equal; nothing of nothing
keys, values = torch.ones(3, 16, 1, 64).half(), torch.zeros(3, 16, 1, 64).half()
values[2, 0], values[2, 1] = 4.0, 8.0
for group in (1, 4):
    out = torch.full((3, 1, 64), torch.nan).half()
    pages = torch.tensor([[2], [2], [2]], dtype=torch.int32)
    lengths = torch.tensor([1, 2, 0], dtype=torch.int32)
    given = torch.ones(3, 1, 64).half(), keys, values, pages, lengths, 1.0, out
    paged_attention.paged_attention(*given, group=group)
    assert out[:, 0, 0].tolist() == [4.0, 6.0, 0.0], out[:, 0, 0]

for heads, key_heads, width, page in ((4, 2, 64, 16), (3, 3, 128, 16), (16, 1, 64, 32), (6, 2, 64, 64)):
    for keys, values in caches(9, page, key_heads, width):
        lengths = [1, page, page + 1, 2 * page - 1, 4 * page, 3]
        query = torch.randn(len(lengths), 3 * heads, width).half()[:, heads : 2 * heads]  # among others
        pages = torch.stack([torch.randperm(9)[:4] for _ in lengths]).int()
        pages[1:3, :1] = pages[0, 0]  # of one prompt
        told = torch.tensor(lengths, dtype=torch.int32)
        plain = paged_attention.plain_attention(query, keys, values, pages, told, 0.3)
        for group in {1, paged_attention.responses_together(heads // key_heads, 10**6)}:
            out = torch.full_like(query, torch.nan)
            paged_attention.paged_attention(query, keys, values, pages, told, 0.3, out, group)
            for row, length in enumerate(lengths):
                exact = by_torch(query[row], keys, values, pages[row], length, 0.3)
                torch.testing.assert_close(out[row].float(), exact, rtol=2e-3, atol=2e-3)
                torch.testing.assert_close(plain[row], exact, rtol=1e-5, atol=1e-5)
print("all the same")
"""
)
GROUPS = (
    SHARED
    + """
shared = [1, 2, 3, 4, 6, 8, 9, 16]
together = paged_attention.responses_together
assert [together(one, 10**6) for one in shared] == [16, 8, 4, 4, 2, 2, 1, 1]
assert [together(2, pairs) for pairs in (2048, 2047, 1024, 512, 511, 8)] == [8, 4, 4, 2, 1, 1]
page, width = 16, 64
(keys, values), _ = caches(200, page, 1, width)


def check(pages, lengths, group):
    rows = len(lengths)
    query = torch.randn(rows, 2, width).half()
    told, out = torch.tensor(lengths, dtype=torch.int32), torch.full((rows, 2, width), torch.nan).half()
    paged_attention.paged_attention(query, keys, values, pages, told, 0.3, out, group)
    for row, length in enumerate(lengths):
        exact = torch.zeros(2, width)
        if length:
            exact = by_torch(query[row], keys, values, pages[row], length, 0.3)
        torch.testing.assert_close(out[row].float(), exact, rtol=2e-3, atol=2e-3)


def made(rows, shared, most=7):
    '''Pages of so many responses, the first ones of which all have.'''
    pages = torch.randperm(200)[: rows * most].view(rows, most).int()
    pages[:, :shared] = pages[0, :shared]
    return pages


for group in (2, 4, 8):
    check(made(8, 4), [7 * page] * 8, group)
    check(made(8, 4), [4 * page + 1] * 8, group)
    check(made(8, 4), [4 * page + 3 * number for number in range(8)], group)
    # some are shorter than what is shared, some fill up a batch
    check(made(8, 4), [4 * page, 2 * page - 1, 5 * page, 1, 6 * page, 7 * page, page, 3], group)
    check(made(11, 3), [5 * page, 0, 90, 0, 60, 70, 80, 0, 100, 0, 0], group)
    check(made(11, 3), [0, 70, 0, 80, 90, 0, 0, 0, 50, 100, 60], group)
    check(made(8, 2), [0] * 8, group)
    check(made(8, 7), [7 * page] * 8, group)  # nothing of their own
    check(made(5, 0), [3, 111, 17, 16, 32], group)  # nothing in common
    # a page that all have, but not at the beginning
    pages = made(8, 0)
    pages[:, 2] = pages[0, 2]
    check(pages, [7 * page] * 8, group)
    # the first one does not have what the others do
    pages = made(8, 3)
    pages[0, 1] = pages[1, 6]
    check(pages, [6 * page] * 8, group)

# what is shared is looked at once: in blocks of 64 tokens, of which every one of 8 responses has 8 at a time
blocks, look_at = [], paged_kernels._look_at


def counting(*given):
    blocks.append(1)
    return look_at(*given)


def looks(pages, lengths):
    blocks.clear()
    check(pages, lengths, 8)
    return len(blocks)


paged_kernels._look_at = counting
assert looks(made(8, 4), [6 * page] * 8) == 1 + 4  # 64 tokens of all, then 32 of each
assert looks(made(8, 0), [6 * page] * 8) == 12  # 96 of each
one, another = made(3, 4), made(5, 5)
assert looks(torch.cat([one, another]), [6 * page] * 8) == 1 + 2 + 4  # 64 of three, 80 of five, at most 32
beside = torch.cat([one, another])[[0, 3, 1, 4, 2, 5, 6, 7]]
assert looks(beside, [6 * page] * 8) == 1 + 2 + 4  # wherever they stand
one, another = made(4, 5), made(4, 5)
another[:, :2] = one[0, :2]  # a system prompt
assert looks(torch.cat([one, another]), [6 * page] * 8) == 1 + 1 + 1 + 2  # 32 of all, 48 of each four, 16
assert looks(torch.cat([made(1, 0), made(7, 5)]), [6 * page] * 8) == 2 + 12  # one shares with nobody
assert looks(made(8, 4), [6 * page, 0, 6 * page, 0, 0, 6 * page, 0, 0]) == 1 + 4

# rows behind the last one are somebody else's, and pages behind those that are looked at can be anything
pages, lengths = made(8, 4), torch.tensor([6 * page] * 5 + [5] * 3, dtype=torch.int32)
pages[5:] = torch.iinfo(torch.int32).max
pages[:, 6] = torch.iinfo(torch.int32).max
blocks.clear()
query, out = torch.randn(5, 2, width).half(), torch.full((5, 2, width), torch.nan).half()
paged_attention.paged_attention(query, keys, values, pages[:5], lengths[:5], 0.3, out, 8)
assert len(blocks) == 1 + 4
for row in range(5):
    exact = by_torch(query[row], keys, values, pages[row, :6], 6 * page, 0.3)
    torch.testing.assert_close(out[row].float(), exact, rtol=2e-3, atol=2e-3)

# no more pages are found to be common than are compared
paged_attention.LONGEST = 2 * page
assert looks(made(8, 4), [6 * page] * 8) == 1 + 8
paged_attention.LONGEST = 1024

# the trial notices
common_pages, page_of = paged_kernels._common_pages, paged_kernels._page
kind = torch.device("cpu"), torch.float16, 2, 64, 16, 4
assert paged_attention.is_right(*kind)
for name, wrong in {
    "_common_pages": lambda *given: common_pages(*given) + 1,
    "_page": lambda table, places, *others: page_of(table, places + 1, *others),
    "_look_at": lambda *given: look_at(*given[:4], given[3][None, :], *given[5:]),  # of others, too
}.items():
    right = getattr(paged_kernels, name)
    setattr(paged_kernels, name, wrong)
    assert not paged_attention.is_right(*kind), name
    setattr(paged_kernels, name, right)

# a page that nobody may look at is not read: numbers that are none would spread
pages = made(8, 2)
used = set(pages.flatten().tolist())
keys[[number for number in range(200) if number not in used]] = torch.nan
check(pages, [2 * page + 5 * number + 1 for number in range(8)], 8)

# places of more than 2^31 numbers: a cache of which hardly anything is ever touched
far = torch.empty(66_000, 2, page, 16, 64, dtype=torch.float16)
pages = torch.tensor([[65_999, 2], [65_999, 65_537]], dtype=torch.int32)
for number in (2, 65_537, 65_999):
    far[number] = torch.randn(2, page, 16, 64).half()
keys, values = far.unbind(1)
query, out = torch.randn(2, 16, 64).half(), torch.full((2, 16, 64), torch.nan).half()
told = torch.tensor([page + 5, 2 * page], dtype=torch.int32)
paged_attention.paged_attention(query, keys, values, pages, told, 0.3, out, 2)
for row, length in enumerate(told.tolist()):
    exact = by_torch(query[row], keys, values, pages[row], length, 0.3)
    torch.testing.assert_close(out[row].float(), exact, rtol=2e-3, atol=2e-3)
print("all the same")
"""
)
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
@pytest.mark.parametrize(
    "check", [KERNEL, GROUPS, IN_FRONT], ids=["kernel", "in groups", "in front of FlashAttention"]
)
def test_decoding_is_attention(check: str) -> None:
    interpreted(check)


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
