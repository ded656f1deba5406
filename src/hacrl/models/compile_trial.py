"""Whether a model's layers can be compiled for learning, found out before it matters."""

from __future__ import annotations

from typing import Any

import torch

from hacrl.models.compile import compiled, decoder_layers
from hacrl.models.device import is_out_of_memory
from hacrl.models.lm_head import logits_may_wait, separate_head
from hacrl.models.logprobs import packs, response_logprobs
from hacrl.models.packing import ragged
from hacrl.types import Sampling

RESPONSE = (4, 5, 6, 7, 8) * 5


def why_not_compiled(model: Any, tokens: int) -> str | None:
    """What is in the way of compiling this model's layers, found out by trying; None if nothing is.

    A compiler needs a C compiler and Triton, and it does not understand all that models are written in. What
    is compiled now is what learning needs if it has about so many tokens at a time: torch compiles apart for
    few, for more and for many.
    """
    if not decoder_layers(model):
        return f"{type(model).__name__} does not say which its layers are"
    shared = (1, 2, 3)
    responses = max(1, tokens // len(RESPONSE))
    pairs = [*[(shared, RESPONSE)] * responses, (shared, (5, 6, 7)), ((2, 4), (6, 8))]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        packed = packs(model, pairs)  # found out by plain forward passes,
        separate_head(model)  # and so is this
        with compiled(model), ragged(model, packed), logits_may_wait(False):  # a trial need not be fast
            logprobs, _ = response_logprobs(model, pairs, Sampling(8), model.device)
            # what comes first is behind all layers, and gradients of all would take their memory twice
            total = logprobs.sum()
            (found,) = torch.autograd.grad(total, trained[0], allow_unused=True)
            if found is None:  # e.g. of a part that sees pictures
                torch.autograd.grad(total, trained, allow_unused=True)
    except Exception as error:  # whatever it is, learning can do without
        if is_out_of_memory(error):
            raise  # that says nothing of the model
        return (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            if str(error)
            else repr(error)
        )
    return None
