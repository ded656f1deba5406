"""Derive seeds from names instead of call order.

Every random draw is keyed by what it is for (run seed, purpose, agent, step). So nothing depends on the
order in which agents take their turns, and any step can be repeated without replaying earlier steps.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``derive_seed(0, "rollout", "ada", 7)``."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
