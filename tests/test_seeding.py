"""Seeds are keyed by purpose."""

from __future__ import annotations

import hashlib
from itertools import product

from hacrl.seeding import derive_seed


def test_seed_is_the_head_of_a_hash() -> None:
    # sha256 of "0", "rollout", "ada", "7" with unit separators; its first 8 bytes, less the lowest bit
    digest = hashlib.sha256(b"0\x1frollout\x1fada\x1f7").hexdigest()
    assert derive_seed(0, "rollout", "ada", 7) == int(digest[:16], 16) // 2


def test_every_part_matters_and_parts_are_separated() -> None:
    keys = [
        (seed, *purpose)
        for seed, purpose in product(
            (0, 1, 10),
            [("a", 1), ("a", 11), ("a1", 1), ("a", "1", "1"), ("a",), (1, "a"), ("b", 1), ("a1",), ()],
        )
    ]
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)


def test_seeds_fit_torch_and_spread_over_63_bits() -> None:
    seeds = [derive_seed(0, "spread", i) for i in range(2000)]
    assert max(seeds) < 2**63
    # each bit is set in 1000 of 2000 seeds, give or take five standard deviations of sqrt(500) = 22.4
    for bit in range(63):
        assert abs(sum(seed >> bit & 1 for seed in seeds) - 1000) < 112
