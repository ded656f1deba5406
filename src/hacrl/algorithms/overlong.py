"""Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): a response that nears the limit loses reward.

    R_length(y) = 0                                   |y| <= L - B
                  ((L - B) - |y|) / B                 L - B < |y| <= L

L is the longest response there can be, B the buffer before it. The reward falls evenly over the buffer, to 1
below the verdict's at the limit. |y| is in the source's tokens, the stop token included.
"""

from __future__ import annotations


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return R_length, from 0 to -1, of a response of ``length`` tokens; 0 without a buffer."""
    beyond = length - (longest - buffer)
    return -beyond / buffer if beyond > 0 and buffer > 0 else 0.0
