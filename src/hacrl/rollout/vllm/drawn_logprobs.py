"""Log-probability and rank of each drawn token, out of logits that are read once.

vLLM's Triton kernels read them three times (for the largest, for the sum, for the rank), with one program for
a response: a GPU has not enough to do with a few hundred of those. Here a row is read in pieces, by a program
each, and what the pieces say is put together by another one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE, WARPS = 8192, 8  # logits of a program, and its warps
NOTED = 3  # numbers of a piece: the largest logit, the sum of their powers, how many are as likely


def drawn_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row's token: the log-probability (N), float32, and the rank (N), int64, from 1.

    Logits are (N, V), those of one row side by side; tokens are (N). As in vLLM, tokens that are as likely
    as the drawn one count as more likely.
    """
    rows, vocabulary = logits.shape
    pieces = triton.cdiv(vocabulary, PIECE)
    noted = torch.empty(rows, pieces, NOTED, device=logits.device)
    logprobs = torch.empty(rows, device=logits.device)
    ranks = torch.empty(rows, device=logits.device, dtype=torch.int64)
    of_logits = (logits, tokens, noted, logits.stride(0), vocabulary)
    _look_at_a_piece[(rows, pieces)](*of_logits, NOTED=NOTED, PIECE=PIECE, num_warps=WARPS)
    of_pieces = (logits, tokens, noted, logprobs, ranks, logits.stride(0), pieces)
    all_pieces = triton.next_power_of_2(pieces)
    _put_together[(rows,)](*of_pieces, NOTED=NOTED, PIECES=all_pieces, num_warps=1)
    return logprobs, ranks


@torch.no_grad()
def is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compute that on this device. To be tried: compilers differ."""
    sizes = (2 * PIECE + 80, 2 * PIECE + 77)  # compiled apart: a multiple of 16, and none
    return all(_is_right(device, dtype, vocabulary) for vocabulary in sizes)


def _is_right(device: torch.device, dtype: torch.dtype, vocabulary: int) -> bool:
    generator = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(4, vocabulary, generator=generator, device=device).mul(4).to(dtype)
    logits[1, :PIECE] = -torch.inf  # what top-k and top-p leave out: a whole piece,
    logits[2, 1:] = -torch.inf  # and all but one
    tokens = torch.tensor([vocabulary - 1, 2 * PIECE, 0, 5], device=device)
    try:
        found, ranks = drawn_logprobs(logits, tokens)
    except Exception:  # whatever it is, vLLM has others
        return False
    exact, exact_ranks = plain_logprobs(logits, tokens)
    return torch.allclose(found.double(), exact, atol=1e-4) and torch.equal(ranks, exact_ranks)


def plain_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`drawn_logprobs` computes, in float64."""
    drawn = logits.gather(1, tokens[:, None])
    logprobs = logits.double().log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    return logprobs, (logits >= drawn).sum(dim=1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _look_at_a_piece(  # type: ignore[no-untyped-def]
    logits, tokens, noted, logits_row, vocabulary, NOTED: tl.constexpr, PIECE: tl.constexpr
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    drawn = tl.load(logits + row * logits_row + tl.load(tokens + row)).to(tl.float32)
    places = piece * PIECE + tl.arange(0, PIECE)
    is_token = places < vocabulary
    found = tl.load(logits + row * logits_row + places, mask=is_token, other=-float("inf")).to(tl.float32)
    largest = tl.max(found, 0)
    at_least = tl.where(largest == -float("inf"), 0.0, largest)  # nothing in it can be drawn
    note = noted + (row * tl.num_programs(1) + piece) * NOTED
    tl.store(note, largest)
    tl.store(note + 1, tl.sum(tl.exp(found - at_least), 0))
    tl.store(note + 2, tl.sum((is_token & (found >= drawn)).to(tl.float32), 0))


@triton.jit(do_not_specialize=["pieces"])  # type: ignore[untyped-decorator, unused-ignore]
def _put_together(  # type: ignore[no-untyped-def]
    logits, tokens, noted, logprobs, ranks, logits_row, pieces, NOTED: tl.constexpr, PIECES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    drawn = tl.load(logits + row * logits_row + tl.load(tokens + row)).to(tl.float32)
    places = tl.arange(0, PIECES)
    is_piece = places < pieces
    notes = noted + (row * pieces + places) * NOTED
    largest = tl.load(notes, mask=is_piece, other=-float("inf"))
    totals = tl.load(notes + 1, mask=is_piece, other=0.0)
    as_likely = tl.load(notes + 2, mask=is_piece, other=0.0)
    of_all = tl.max(largest, 0)
    total = tl.sum(totals * tl.exp(largest - of_all), 0)
    tl.store(logprobs + row, drawn - of_all - tl.log(total))
    tl.store(ranks + row, tl.sum(as_likely, 0).to(tl.int64))
