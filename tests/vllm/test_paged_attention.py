"""Our kernel of attention over vLLM's pages, run by Triton's interpreter: numbers without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted import interpreted

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
assert [together(one, 10**6) for one in shared] == [4, 4, 4, 4, 2, 2, 1, 1]
assert [together(2, pairs) for pairs in (2048, 1024, 1023, 512, 511, 8)] == [4, 4, 2, 2, 1, 1]
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
paged_attention.WAY = paged_attention.Way(64, 4)
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


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
@pytest.mark.parametrize("check", [KERNEL, GROUPS], ids=["one by one", "in groups"])
def test_it_computes_attention(check: str) -> None:
    interpreted(check)
