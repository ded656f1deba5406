"""From hidden states to log-probabilities, a piece at a time.

Logits over a large vocabulary would take most of a learner's memory. They are made for a piece of the tokens
at a time, and again in the backward pass; where a GPU has room for more, they may wait for it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hacrl.agents.compiled import compiled_if_wanted
from hacrl.agents.linear_logprobs import is_plain_linear, linear_logprobs
from hacrl.agents.packing import model_inputs, whole_sequences
from hacrl.agents.ragged import can_be_ragged, ragged
from hacrl.agents.sampling import token_logprobs
from hacrl.types import Sampling

MOST_LOGITS = 2**26  # that exist at a time: 256 MiB in float32, a few times that with what is made of them
# Compiled, they exist in the weights' 16 bits alone. Large pieces are fewer, and with every piece a gradient
# as large as the output layer is added to the one before.
MOST_COMPILED_LOGITS = 2**28
BY_HAND_ON = ("cuda",)  # where the backward pass waits for memory; elsewhere it stays autograd's, to the bit
_HEADS: WeakKeyDictionary[Any, Callable[[Tensor], Tensor] | None] = WeakKeyDictionary()


def plain_model(model: Any) -> Any:
    """The Hugging Face model itself; adapters are inside of it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def separate_head(model: Any) -> Callable[[Tensor], Tensor] | None:
    """From hidden states to logits, if for this model that is its output layer and nothing else.

    Some architectures scale or cap their logits. Whether this one does is seen by trying, once.
    """
    if model not in _HEADS:
        plain = plain_model(model)
        head = plain.get_output_embeddings()
        inputs = model_inputs(*whole_sequences([range(1, 5)], model.device))
        if not can_be_ragged(model):
            inputs = {"input_ids": inputs["input_ids"], "use_cache": False}
        seen: list[tuple[Tensor, Tensor]] = []  # what the layer is given, and what it gives
        watched = head.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
        try:
            with torch.no_grad(), ragged(model, can_be_ragged(model)):
                logits = model(**inputs).logits
                hidden = getattr(plain.base_model(**inputs), "last_hidden_state", None)
        finally:
            watched.remove()
        same = len(seen) == 1 and hidden is not None and _is_all_there_is(logits, hidden, *seen[0])
        _HEADS[model] = head if same else None
    return _HEADS[model]


def _is_all_there_is(logits: Tensor, hidden: Tensor, given: Tensor, made: Tensor) -> bool:
    """Whether nothing is done before the output layer or after it."""
    if hidden.shape != given.shape or logits.shape != made.shape:
        return False
    # a cap leaves small logits nearly as they are: only what is equal is the same
    if not torch.equal(logits, made.to(logits.dtype)):
        return False
    return torch.allclose(hidden, given, rtol=0.02, atol=0.02 * float(hidden.abs().mean()))


def logprobs_in_pieces(
    head: Callable[[Tensor], Tensor], hidden_N: Tensor, targets_N: Tensor, sampling: Sampling, vocabulary: int
) -> Tensor:
    """log-probability of each target, (N, hidden), (N,) -> (N,)."""
    compute = compiled_if_wanted(_piece_logprobs)
    most = most_logits(sampling, is_compiled=compute is not _piece_logprobs)
    if hidden_N.device.type in BY_HAND_ON and is_plain_linear(head, hidden_N, sampling):
        return linear_logprobs(hidden_N, head.weight, targets_N, sampling.temperature, most)
    size = max(1, most // vocabulary)
    pieces = [
        checkpoint(
            compute,
            head,
            piece.clone(),  # a view is compiled apart if it is all there is
            targets.clone(),
            sampling,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for piece, targets in zip(torch.split(hidden_N, size), torch.split(targets_N, size), strict=True)
    ]
    return torch.cat(pieces)


def most_logits(sampling: Sampling, is_compiled: bool) -> int:
    """That a piece may have: top-k and top-p sort them, and that takes many times their memory."""
    filtered = sampling.top_k != 0 or sampling.top_p != 1.0
    return MOST_COMPILED_LOGITS if is_compiled and not filtered else MOST_LOGITS


def _piece_logprobs(
    head: Callable[[Tensor], Tensor], piece: Tensor, targets: Tensor, sampling: Sampling
) -> Tensor:
    return token_logprobs(head(piece), targets, sampling)
