"""Triton's part of :mod:`hacrl.rollout.vllm.paged_attention`."""

from __future__ import annotations

import triton
import triton.language as tl


# numbers that nothing is gained by knowing more of: whatever they are, what was tried is what is used
@triton.jit(do_not_specialize=["rows", "pages_row"])  # type: ignore[untyped-decorator, unused-ignore]
def attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    out,
    pages,
    lengths,
    scale,
    rows,
    query_row,
    query_head,
    key_page,
    key_token,
    key_head,
    value_page,
    value_token,
    value_head,
    out_row,
    out_head,
    pages_row,
    SHARED: tl.constexpr,  # query heads to a head of keys
    QUERIES: tl.constexpr,  # rows of the matrix product
    GROUP: tl.constexpr,  # responses of a program: GROUP * SHARED <= QUERIES
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    MOST_PAGES: tl.constexpr,  # that can be found to be common
    BLOCK: tl.constexpr,  # tokens at a time
):
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
    own: tl.constexpr = BLOCK // GROUP  # tokens of a response in a block
    telling = first + tl.arange(0, BLOCK) // own  # whose token it is
    length = tl.load(lengths + telling, mask=telling < rows, other=0)
    seen_until = tl.zeros([BLOCK], tl.int32)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)

    if GROUP > 1:
        members = first + tl.arange(0, GROUP)
        common = _common_pages(pages, lengths, members, members < rows, first, pages_row, PAGE, MOST_PAGES)
        place_of_next = (pages, lengths, rows, pages_row, common)
        of_members, of_asking, of_telling = (
            _next_page(place_of_next, members, PAGE),
            _next_page(place_of_next, asking, PAGE),
            _next_page(place_of_next, telling, PAGE),
        )
        pairs = tl.sum(tl.sum((of_members[:, None] == of_members[None, :]).to(tl.int32), 1), 0) - GROUP
        turns = tl.where(pairs > 0, GROUP, 0)
        for turn in range(-1, turns):  # all of them, then whoever goes on like the first, the second, ...
            leader = first + tl.maximum(turn, 0)
            next_page = tl.sum(tl.where(members == leader, of_members, 0), 0)
            alike = of_members == next_page
            before = alike & (members < leader)
            is_due = (tl.sum(alike.to(tl.int32), 0) > 1) & (tl.sum(before.to(tl.int32), 0) == 0)
            begin, end = common, common
            if turn < 0:
                begin = begin * 0
            elif is_due:
                end = _common_pages(pages, lengths, members, alike, leader, pages_row, PAGE, MOST_PAGES)
            looks = (turn < 0) | (of_asking == next_page)
            table = pages + leader * pages_row
            page_ahead = _page(table, begin * PAGE + tl.arange(0, BLOCK), end * PAGE, PAGE)
            for start in range(begin * PAGE, end * PAGE, BLOCK):
                places = start + tl.arange(0, BLOCK)
                seen = places < end * PAGE
                page, page_ahead = page_ahead.to(tl.int64), _page(table, places + BLOCK, end * PAGE, PAGE)
                key_at = keys + page * key_page + (places % PAGE) * key_token + head * key_head
                value_at = values + page * value_page + (places % PAGE) * value_token + head * value_head
                look = (asked, key_at, value_at, widths, seen, looks[:, None] & seen[None, :], scale)
                largest, total, mixed = _look_at(look, largest, total, mixed)
            is_told = (turn < 0) | (is_due & (of_telling == next_page))
            seen_until = tl.where(is_told, end * PAGE, seen_until)

    is_own = asking[:, None] == telling[None, :]
    table = pages + telling * pages_row
    page_ahead = _page(table, seen_until + tl.arange(0, BLOCK) % own, length, PAGE)
    for start in range(0, tl.max(length - seen_until, 0), own):
        places = seen_until + start + tl.arange(0, BLOCK) % own
        seen = places < length
        page, page_ahead = page_ahead.to(tl.int64), _page(table, places + own, length, PAGE)
        key_at = keys + page * key_page + (places % PAGE) * key_token + head * key_head
        value_at = values + page * value_page + (places % PAGE) * value_token + head * value_head
        look = (asked, key_at, value_at, widths, seen, is_own & seen[None, :], scale)
        largest, total, mixed = _look_at(look, largest, total, mixed)

    has_any = tl.load(lengths + asking, mask=is_query, other=0) > 0  # others fill up a batch
    mixed = tl.where(has_any[:, None], mixed / tl.where(has_any, total, 1.0)[:, None], 0.0)
    out_at = out + asking * out_row + heads * out_head
    tl.store(out_at[:, None] + widths[None, :], mixed.to(out.dtype.element_ty), mask=is_query[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _common_pages(  # type: ignore[no-untyped-def]
    pages, lengths, members, among, leader, pages_row, PAGE: tl.constexpr, MOST_PAGES: tl.constexpr
):
    """How many full pages those ``among`` the members begin with in common; rows of length 0 have no say."""
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
def _next_page(place, row, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The page behind those that all have, of each row; if that is not full, a number of the row's own."""
    pages, lengths, rows, pages_row, common = place
    is_full = tl.load(lengths + row, mask=row < rows, other=0) >= (common + 1) * PAGE
    page = tl.load(pages + row * pages_row + common, mask=is_full, other=0)
    return tl.where(is_full, page, -1 - row)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _page(table, places, until, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pages in which tokens are. Asked for a block ahead: keys are fetched early if it is known where."""
    return tl.load(table + places // PAGE, mask=places < until, other=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _look_at(look, largest, total, mixed):  # type: ignore[no-untyped-def]
    """A block more of keys and values in a softmax under way; its powers are those of 2."""
    asked, key_at, value_at, widths, seen, may_see, scale = look
    key = tl.load(key_at[:, None] + widths[None, :], mask=seen[:, None], other=0.0)
    scores = tl.where(may_see, tl.dot(asked, tl.trans(key)) * scale, -float("inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    at_least = tl.where(larger == -float("inf"), 0.0, larger)  # of one that has not seen anything yet
    weights, shrunk = tl.exp2(scores - at_least[:, None]), tl.exp2(largest - at_least)
    value = tl.load(value_at[:, None] + widths[None, :], mask=seen[:, None], other=0.0)
    mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
    return larger, total * shrunk + tl.sum(weights, 1), mixed
