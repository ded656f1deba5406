"""Random numbers that depend on a response and a position alone, not on the batch they are drawn in.

A generator gives its next numbers to whoever asks next, so a response would depend on the others in its batch
and on the process that samples it. Here each number is a hash of the response's seed, the token's position,
and the candidate token: a counter-based generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64  # as a signed integer
_MIX_64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # of splitmix64
_GOLDEN_32 = 0x9E3779B9 - 2**32
_MIX_32 = (0x7FEB352D, 0x846CA68B - 2**32)  # of lowbias32


def token_keys(seeds_B: Tensor, positions_B: Tensor | int) -> Tensor:
    """Return one 64-bit key per row from its response's seed and the position of its next token.

    Both are int64; ``positions_B`` may be a number. This is splitmix64 at that position of its sequence.
    """
    if isinstance(positions_B, int):
        positions_B = torch.full_like(seeds_B, positions_B)
    keys = seeds_B + (positions_B + 1) * _GOLDEN_64
    keys = (keys ^ _shifted(keys, 30, 64)) * _MIX_64[0]
    keys = (keys ^ _shifted(keys, 27, 64)) * _MIX_64[1]
    return keys ^ _shifted(keys, 31, 64)


def exponential_noise(keys_B: Tensor, vocabulary: int) -> Tensor:
    """Return exponentially distributed numbers, (B, V) in float32, that depend on the row's key alone."""
    low, high = keys_B.to(torch.int32).unsqueeze(1), (keys_B >> 32).to(torch.int32).unsqueeze(1)
    bits = low + torch.arange(vocabulary, dtype=torch.int32, device=keys_B.device) * _GOLDEN_32
    bits ^= _shifted(bits, 16, 32)
    bits *= _MIX_32[0]
    bits ^= _shifted(bits, 15, 32)
    bits ^= high  # in the middle, so that no row is a shifted copy of another
    bits *= _MIX_32[1]
    bits ^= _shifted(bits, 16, 32)
    bits &= 0x7FFFFFFF
    # Small numbers decide the race, and this way they have 31 bits.
    return bits.float().add_(0.5).mul_(2.0**-31).neg_().log1p_().neg_()


def _shifted(bits: Tensor, by: int, width: int) -> Tensor:
    """Return the bits shifted to the right, with zeros from the left: torch's shift repeats the sign."""
    return (bits >> by).bitwise_and_((1 << (width - by)) - 1)
