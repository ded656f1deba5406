"""Derive seeds from names instead of call order.

Every random draw has a key: run seed, purpose, agent, step. So results do not depend on the order in which
agents are processed, and any step can be repeated without replaying earlier steps.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``derive_seed(0, "rollout", "ada", 7)``."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
