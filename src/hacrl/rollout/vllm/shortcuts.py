"""Less of vLLM's bookkeeping: answers that it works out for every token and that are the same for most.

With a small model and hundreds of responses at a time, vLLM's Python takes longer than the GPU does. Half of
what its scheduler does goes into asking, for every token of every response, whether a new block of keys and
values is needed; with 16 tokens to a block, the answer is yes for one token of 16.
"""

from __future__ import annotations

from typing import Any

# Versions whose code was read: a later one may have more to do for a token than is done here.
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
    """Whether it is between the first and the last version that was read."""
    parts = version.split(".")[:2]
    return all(part.isdigit() for part in parts) and FIRST <= tuple(map(int, parts)) <= LAST


def _ask_for_slots_by_block(manager: Any, blocks: Any) -> None:
    size, cached = blocks.block_size, blocks.num_cached_block  # by request: how many blocks others may share
    longest, nothing = manager.max_model_len, manager.empty_kv_cache_blocks
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *others: Any, **named: Any) -> Any:
        """A slot for a response's next token; those in a block that it has already are its own."""
        place = request.num_computed_tokens
        if num_new_tokens == 1 and place % size and place < longest and not (others or any(named.values())):
            known = min(place + 1, request.num_tokens)
            if known // size <= cached.get(request.request_id, 0):  # no block was filled that could be shared
                return nothing
        return allocate(request, num_new_tokens, *others, **named)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        """Let others share what is full."""
        if num_computed_tokens // size > cached.get(request.request_id, 0):
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
