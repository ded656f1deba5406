"""Less of vLLM's bookkeeping: answers that it works out for every token and that are the same for most.

With a small model and hundreds of responses at a time, vLLM's Python takes longer than the GPU does. Half of
what its scheduler does goes into asking, for every token of every response, whether a new block of keys and
values is needed; with 16 tokens to a block, the answer is yes for one token of 16.
"""

from __future__ import annotations

from typing import Any

# The code of both was read, and that between is taken to be like it. A later one may have more to do for a
# token than is done here.
FIRST, LAST = (0, 25), (0, 32)


def take_shortcuts(scheduler: Any, version: str) -> bool:
    """Make a vLLM scheduler decide the same with less work; False: this one is left as it is."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    kinds: list[Any] = list(getattr(getattr(manager, "coordinator", None), "single_type_managers", ()))
    # blocks stay until a response has ended, and none come from elsewhere
    is_plain = [type(kind).__name__ for kind in kinds] == ["FullAttentionManager"]
    if not (is_plain and scheduler.connector is None and is_known(version)):
        return False
    _ask_for_slots_by_block(manager, *kinds)
    return True


def is_known(version: str) -> bool:
    """Whether it is one of the two, or between them."""
    parts = version.split(".")[:2]
    return all(part.isdigit() for part in parts) and FIRST <= tuple(map(int, parts)) <= LAST


def _ask_for_slots_by_block(manager: Any, blocks: Any) -> None:
    size, cached = blocks.block_size, blocks.num_cached_block  # by request: how many blocks others may share
    nothing, allocate, cache = manager.empty_kv_cache_blocks, manager.allocate_slots, manager.cache_blocks

    def is_shareable(request: Any, tokens: int) -> bool:
        """Whether so many tokens fill a block that nobody knows of yet."""
        return bool(tokens // size > cached.get(request.request_id, 0))

    def allocate_slots(request: Any, num_new_tokens: int, *others: Any, **named: Any) -> Any:
        """Blocks for the next tokens of a request; one more token may go where the last one has."""
        is_plain = num_new_tokens == 1 and not others and not any(named.values())
        if is_plain and request.num_computed_tokens % size and not is_shareable(request, request.num_tokens):
            return nothing
        return allocate(request, num_new_tokens, *others, **named)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        """Let others share what is full."""
        if is_shareable(request, num_computed_tokens):
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
