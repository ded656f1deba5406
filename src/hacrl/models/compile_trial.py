"""Try out whether a model's layers can be compiled, before training depends on it."""

from __future__ import annotations

from typing import Any

import torch

from hacrl.models.compile import compiled, decoder_layers
from hacrl.models.device import is_out_of_memory
from hacrl.models.lm_head import logit_caching, separate_head
from hacrl.models.logprobs import response_logprobs, uses_packing
from hacrl.models.packing_support import packed_sequences
from hacrl.types import Sampling

RESPONSE = (4, 5, 6, 7, 8) * 5


def find_compile_problem(model: Any, tokens: int) -> str | None:
    """Compile the layers for one forward and backward pass. Return the error as text, or None if it worked.

    A compiler needs a C compiler and Triton, and does not support all code that models consist of. ``tokens``
    is the usual size of a micro-batch: torch compiles separate variants for few and for many tokens, and this
    trial compiles those that learning needs.
    """
    if not decoder_layers(model):
        return f"{type(model).__name__} does not mark its decoder layers"
    prompt = (1, 2, 3)
    responses = max(1, tokens // len(RESPONSE))
    pairs = [*[(prompt, RESPONSE)] * responses, (prompt, (5, 6, 7)), ((2, 4), (6, 8))]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        # these two run plain forward passes, which must not be compiled
        packed = uses_packing(model, pairs)
        separate_head(model)
        with compiled(model), packed_sequences(model, packed), logit_caching(False):
            logprobs, _ = response_logprobs(model, pairs, Sampling(8), model.device)
            # The first parameter lies behind all layers. Gradients of all would take their memory twice.
            total = logprobs.sum()
            (gradient,) = torch.autograd.grad(total, trained[0], allow_unused=True)
            if gradient is None:  # e.g. a parameter of an image encoder
                torch.autograd.grad(total, trained, allow_unused=True)
    except Exception as error:  # whatever the error is, learning works without the compiler
        if is_out_of_memory(error):
            raise  # this is no property of the model
        if not str(error):
            return repr(error)
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return None
