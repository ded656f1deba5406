"""vLLM's log-probabilities of drawn tokens by kernels of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from hacrl.rollout.vllm.shortcuts import is_known

FUNCTIONS = ("compute_topk_logprobs", "compute_topk_scores")  # its name in vLLM 0.25, and in 0.32
# Of its arguments: those that come first, and those that say nothing where only drawn tokens' are asked for.
# Any other must say that it is not used.
NEEDED = ("logits", "num_logprobs", "sampled_token_ids")
WITHOUT_EFFECT = ("logprob_token_ids_state", "expanded_idx_mapping")


def take_over_logprobs(version: str) -> bool:
    """Put the kernels in front of vLLM's in this process."""
    if not is_known(version):
        return False
    try:
        from vllm.platforms import current_platform as platform

        if not platform.is_cuda():
            return False
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.sample import sampler

        name = name_in(sampler)
        setattr(sampler, name, with_own_kernels(getattr(sampler, name), LogprobsTensors))
    except (ImportError, AttributeError):  # a vLLM that draws in another way, or no Triton
        return False
    return True


def name_in(module: Any) -> str:
    """Of vLLM's function in a module that has it."""
    for name in FUNCTIONS:
        if hasattr(module, name):
            return name
    raise AttributeError(f"{module} has none of {', '.join(FUNCTIONS)}")


def with_own_kernels(theirs: Callable[..., Any], result: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's function: what it says of drawn tokens alone is ours, where that is right, the rest theirs."""
    from hacrl.rollout.vllm.drawn_logprobs import drawn_logprobs, is_right

    is_usable = cache(is_right)

    def logprobs(*given: Any, **named: Any) -> Any:
        if len(given) < len(NEEDED) or not are_of_drawn_alone(given, named):
            return theirs(*given, **named)
        logits, _, drawn = given[: len(NEEDED)]
        if not is_usable(logits.device, logits.dtype):
            return theirs(*given, **named)
        of_drawn, ranks = drawn_logprobs(logits, drawn)
        return result(drawn[:, None], of_drawn[:, None], ranks)

    return logprobs


def are_of_drawn_alone(given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether no others are asked for, of logits as the kernels read them."""
    logits, others, drawn = given[: len(NEEDED)]
    more = [*given[len(NEEDED) :], *(value for key, value in named.items() if key not in WITHOUT_EFFECT)]
    return (
        others == 0
        and all(value is None or (isinstance(value, int) and value == 0) for value in more)
        and logits.dim() == 2
        and logits.stride(1) == 1
        and drawn.shape == logits.shape[:1]
        and drawn.is_contiguous()
    )
