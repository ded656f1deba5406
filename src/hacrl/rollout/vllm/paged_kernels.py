"""Triton's part of :mod:`hacrl.rollout.vllm.paged_attention`."""

from __future__ import annotations

import triton
import triton.language as tl

# Nothing is gained by knowing more of these numbers: whatever they are, what was tried is what is used.
_ANY = ["rows", "pages_row"]


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def attend(  # type: ignore[no-untyped-def]
    query, keys, values, out, pages, lengths, scale, rows, query_row, query_head, key_page, key_token,
    key_head, value_page, value_token, value_head, out_row, out_head, pages_row,
    SHARED: tl.constexpr,  # query heads to a head of keys
    QUERIES: tl.constexpr,  # rows of the matrix product
    GROUP: tl.constexpr,  # responses of a program: GROUP * SHARED <= QUERIES
    WIDTH: tl.constexpr, PAGE: tl.constexpr,
    MOST_PAGES: tl.constexpr,  # that can be found to be common
    BLOCK: tl.constexpr,  # tokens at a time
):  # fmt: skip
    """A group of responses and one head of keys.

    Pages that all of the group begin with are read once, for the queries of all; then those that some go on
    with, for these. Behind them a block has as many tokens of every response, and what a response's queries
    would make of others' tokens is thrown away: tensor cores have time for that, it is memory that is waited
    for. How sums are rounded depends on the others, then, and a value that is not finite spreads to them.
    """
    first, head = tl.program_id(0) * GROUP, tl.program_id(1)
    widths = tl.arange(0, WIDTH)
    queries = tl.arange(0, QUERIES)
    asking = first + queries // SHARED  # whose query it is
    is_query = (queries < GROUP * SHARED) & (asking < rows)
    heads = head * SHARED + queries % SHARED
    query_at = query + asking * query_row + heads * query_head
    asked = tl.load(query_at[:, None] + widths[None, :], mask=is_query[:, None], other=0.0)
    cache = (keys + head * key_head, values + head * value_head, key_page, key_token, value_page, value_token)
    look = (asked, cache, scale)
    own: tl.constexpr = BLOCK // GROUP  # tokens of a response in a block
    telling = first + tl.arange(0, BLOCK) // own  # whose token it is
    length = tl.load(lengths + telling, mask=telling < rows, other=0)
    seen_until = tl.zeros([BLOCK], tl.int32)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    if GROUP > 1:
        table = (pages, lengths, rows, pages_row)
        largest, total, mixed, seen_until = _look_at_common_pages(
            look, largest, total, mixed, table, first, asking, telling, GROUP, PAGE, MOST_PAGES, BLOCK
        )
    is_own = asking[:, None] == telling[None, :]
    page_ahead = _page(pages + telling * pages_row, seen_until + tl.arange(0, BLOCK) % own, length, PAGE)
    for start in range(0, tl.max(length - seen_until, 0), own):
        places = seen_until + start + tl.arange(0, BLOCK) % own
        page, page_ahead = page_ahead, _page(pages + telling * pages_row, places + own, length, PAGE)
        seen = places < length
        may_see = is_own & seen[None, :]
        largest, total, mixed = _look_at(
            look, page, places, seen, may_see, largest, total, mixed, WIDTH, PAGE
        )
    has_any = tl.load(lengths + asking, mask=is_query, other=0) > 0  # others fill up a batch
    mixed = tl.where(has_any[:, None], mixed / tl.where(has_any, total, 1.0)[:, None], 0.0)
    out_at = out + asking * out_row + heads * out_head
    tl.store(out_at[:, None] + widths[None, :], mixed.to(out.dtype.element_ty), mask=is_query[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _look_at_common_pages(  # type: ignore[no-untyped-def]
    look, largest, total, mixed, table, first, asking, telling,
    GROUP: tl.constexpr, PAGE: tl.constexpr, MOST_PAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The softmax after what responses of a group begin with, and how many tokens each has seen by then."""
    pages, _, rows, pages_row = table
    members = first + tl.arange(0, GROUP)
    common = _common_pages(table, members, members < rows, first, PAGE, MOST_PAGES)
    of_members, of_asking, of_telling = (
        _next_page(table, common, members, PAGE),
        _next_page(table, common, asking, PAGE),
        _next_page(table, common, telling, PAGE),
    )
    seen_until = tl.zeros([BLOCK], tl.int32)
    pairs = tl.sum(tl.sum((of_members[:, None] == of_members[None, :]).to(tl.int32), 1), 0) - GROUP
    turns = tl.where(pairs > 0, GROUP, 0)
    for turn in range(-1, turns):  # all of them, then whoever goes on like the first, the second, ...
        leader = first + tl.maximum(turn, 0)
        next_page = tl.sum(tl.where(members == leader, of_members, 0), 0)
        alike = of_members == next_page
        before = alike & (members < leader)
        is_due = (tl.sum(alike.to(tl.int32), 0) > 1) & (tl.sum(before.to(tl.int32), 0) == 0)
        begin, end = common * PAGE, common * PAGE
        if turn < 0:
            begin = begin * 0
        elif is_due:
            end = _common_pages(table, members, alike, leader, PAGE, MOST_PAGES) * PAGE
        looks = (turn < 0) | (of_asking == next_page)
        page_ahead = _page(pages + leader * pages_row, begin + tl.arange(0, BLOCK), end, PAGE)
        for start in range(begin, end, BLOCK):
            places = start + tl.arange(0, BLOCK)
            page, page_ahead = page_ahead, _page(pages + leader * pages_row, places + BLOCK, end, PAGE)
            seen = places < end
            may_see = looks[:, None] & seen[None, :]
            largest, total, mixed = _look_at(
                look, page, places, seen, may_see, largest, total, mixed, mixed.shape[1], PAGE
            )
        is_told = (turn < 0) | (is_due & (of_telling == next_page))
        seen_until = tl.where(is_told, end, seen_until)
    return largest, total, mixed, seen_until


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _common_pages(table, members, among, leader, PAGE: tl.constexpr, MOST_PAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many full pages those ``among`` the members begin with in common; rows of length 0 have no say."""
    pages, lengths, _, pages_row = table
    length = tl.load(lengths + members, mask=among, other=0)
    counts = length > 0
    shortest = tl.min(tl.where(counts, length, tl.max(length, 0)), 0)
    full = tl.where(tl.load(lengths + leader) > 0, tl.minimum(shortest // PAGE, MOST_PAGES), 0)
    numbers = tl.arange(0, MOST_PAGES)
    leaders = tl.load(pages + leader * pages_row + numbers, mask=numbers < full, other=0)
    theirs = tl.load(
        pages + members[:, None] * pages_row + numbers[None, :],
        mask=counts[:, None] & (numbers < full)[None, :],
        other=0,
    )
    differs = counts[:, None] & (theirs != leaders[None, :])
    return tl.min(tl.where(tl.max(differs.to(tl.int32), 0) > 0, numbers, full), 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _next_page(table, common, row, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The page behind those that all have, of each row; if that is not full, a number of the row's own."""
    pages, lengths, rows, pages_row = table
    is_full = tl.load(lengths + row, mask=row < rows, other=0) >= (common + 1) * PAGE
    page = tl.load(pages + row * pages_row + common, mask=is_full, other=0)
    return tl.where(is_full, page, -1 - row)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _page(row, places, until, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pages in which tokens are. Asked for a block ahead: keys are fetched early if it is known where."""
    return tl.load(row + places // PAGE, mask=places < until, other=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _look_at(  # type: ignore[no-untyped-def]
    look, page, places, seen, may_see, largest, total, mixed, WIDTH: tl.constexpr, PAGE: tl.constexpr
):
    """A block more of keys and values in a softmax under way; its powers are those of 2."""
    asked, cache, scale = look
    keys, values, key_page, key_token, value_page, value_token = cache
    widths, page, token = tl.arange(0, WIDTH), page.to(tl.int64), places % PAGE
    key_at, value_at = (
        keys + page * key_page + token * key_token,
        values + page * value_page + token * value_token,
    )
    key = tl.load(key_at[:, None] + widths[None, :], mask=seen[:, None], other=0.0)
    scores = tl.where(may_see, tl.dot(asked, tl.trans(key)) * scale, -float("inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    at_least = tl.where(larger == -float("inf"), 0.0, larger)  # of one that has not seen anything yet
    weights, shrunk = tl.exp2(scores - at_least[:, None]), tl.exp2(largest - at_least)
    value = tl.load(value_at[:, None] + widths[None, :], mask=seen[:, None], other=0.0)
    mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
    return larger, total * shrunk + tl.sum(weights, 1), mixed
