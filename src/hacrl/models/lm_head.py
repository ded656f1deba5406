"""Log-probabilities from hidden states without holding all logits: chunk by chunk.

Logits over a large vocabulary would take most of a learner's memory. They are computed for a chunk of tokens
at a time, and again in the backward pass.

A plain linear output layer in 16 bits has a backward pass written by hand. Autograd would compute the
log-sum-exp of every chunk twice, write a zero for every token that was not chosen, and make a gradient as
large as the output layer for every chunk. If a GPU has spare memory, some chunks' logits are cached for the
backward pass. Memory plans do not count on this cache, and no number depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hacrl.models.compile import compiled_if_enabled
from hacrl.models.device import unused_memory
from hacrl.models.packing import model_inputs, whole_sequences
from hacrl.models.packing_support import packed_sequences, supports_packing
from hacrl.models.sampling import token_logprobs
from hacrl.types import Sampling

Result = TypeVar("Result")
MAX_LOGITS = 2**26  # in a chunk: 256 MiB in float32, and a few temporary tensors of that size
# Compiled code holds logits only in the weights' 16 bits. Fewer, larger chunks are better: each chunk adds a
# gradient as large as the output layer.
MAX_COMPILED_LOGITS = 2**28
# Where the backward pass is memory-bound. Elsewhere autograd computes it, bit for bit as without chunks.
MANUAL_BACKWARD_DEVICES = ("cuda",)
_HEADS: WeakKeyDictionary[Any, Callable[[Tensor], Tensor] | None] = WeakKeyDictionary()


def without_adapters(model: Any) -> Any:
    """Return the Hugging Face model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def run_as_forward(model: Any, function: Callable[[], Result]) -> Result:
    """Call a function that uses a model's body and output layer one after the other; return its result.

    A sharded model (``hacrl.models.sharding``) gathers their weights for the length of the call only.
    """
    run = getattr(without_adapters(model), "run_as_forward", None)
    return function() if run is None else cast(Result, run(function))


def separate_head(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the output layer if it alone makes logits of hidden states, else None.

    Some architectures scale or cap their logits. A trial finds out, once a model.
    """
    if model not in _HEADS:
        plain = without_adapters(model)
        head = plain.get_output_embeddings()
        inputs = model_inputs(*whole_sequences([range(1, 5)], model.device))
        if not supports_packing(model):
            inputs = {"input_ids": inputs["input_ids"], "use_cache": False}
        calls: list[tuple[Tensor, Tensor]] = []  # the layer's inputs and outputs
        hook = head.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
        try:
            with torch.no_grad(), packed_sequences(model, supports_packing(model)):
                logits = model(**inputs).logits
                body = run_as_forward(model, lambda: plain.base_model(**inputs))
                hidden = getattr(body, "last_hidden_state", None)
        finally:
            hook.remove()
        is_alone = len(calls) == 1 and hidden is not None and _same_tensors(logits, hidden, *calls[0])
        _HEADS[model] = head if is_alone else None
    return _HEADS[model]


def _same_tensors(logits: Tensor, hidden: Tensor, layer_input: Tensor, layer_output: Tensor) -> bool:
    """Return whether the model changes neither the layer's input nor its output."""
    if hidden.shape != layer_input.shape or logits.shape != layer_output.shape:
        return False
    # must be equal: a cap changes small logits only a little
    if not torch.equal(logits, layer_output.to(logits.dtype)):
        return False
    return torch.allclose(hidden, layer_input, rtol=0.02, atol=0.02 * float(hidden.abs().mean()))


def chunked_logprobs(
    head: Callable[[Tensor], Tensor], hidden_N: Tensor, targets_N: Tensor, sampling: Sampling, vocabulary: int
) -> Tensor:
    """Return the log-probability of each target; (N, hidden), (N,) -> (N,)."""
    compute = compiled_if_enabled(_chunk_logprobs)
    max_logits = max_chunk_logits(sampling, is_compiled=compute is not _chunk_logprobs)
    if hidden_N.device.type in MANUAL_BACKWARD_DEVICES and is_plain_linear(head, hidden_N, sampling):
        return linear_logprobs(hidden_N, head.weight, targets_N, sampling.temperature, max_logits)
    size = max(1, max_logits // vocabulary)
    chunks = [
        checkpoint(
            compute,
            head,
            hidden.clone(),  # a compiler would treat a view of the whole tensor as a special case
            targets.clone(),
            sampling,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden, targets in zip(torch.split(hidden_N, size), torch.split(targets_N, size), strict=True)
    ]
    return torch.cat(chunks)


def max_chunk_logits(sampling: Sampling, is_compiled: bool) -> int:
    """Return how many logits a chunk may have. top-k and top-p sort them, which takes much more memory."""
    filtered = sampling.top_k != 0 or sampling.top_p != 1.0
    return MAX_COMPILED_LOGITS if is_compiled and not filtered else MAX_LOGITS


def _chunk_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, sampling: Sampling
) -> Tensor:
    return token_logprobs(head(hidden), targets, sampling)


def is_plain_linear(head: Any, hidden: Tensor, sampling: Sampling) -> TypeGuard[nn.Linear]:
    """Return whether the head is a plain matrix in 16 bits, and the sampling has neither top-k nor top-p."""
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return False
    if type(head.weight) is not nn.Parameter:  # e.g. a DTensor, which is sharded over devices
        return False
    if "forward" in vars(head) or _has_hooks(head) or torch.is_autocast_enabled(hidden.device.type):
        return False
    weight = head.weight
    if weight.dtype not in (torch.bfloat16, torch.float16) or hidden.dtype != weight.dtype:
        return False
    return hidden.device == weight.device and sampling.top_k == 0 and sampling.top_p == 1.0


def _has_hooks(head: nn.Module) -> bool:
    hooks = head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks
    return any(hooks)


def linear_logprobs(
    hidden_N: Tensor, weight: Tensor, targets_N: Tensor, temperature: float, max_logits: int
) -> Tensor:
    """Return the log-probability of each target; (N, hidden), (V, hidden), (N,) -> (N,) in float32.

    The backward pass overwrites a chunk's logits with their gradient. So at most ``max_logits`` exist at a
    time, besides cached ones. A temperature of 0 counts as 1.
    """
    size = max(1, max_logits // len(weight))
    differentiated = torch.is_grad_enabled() and (hidden_N.requires_grad or weight.requires_grad)
    plan = _Plan(
        chunks=max(1, -(-len(hidden_N) // size)),
        sharpness=1 / temperature if temperature else 1.0,
        logprobs=compiled_if_enabled(_logprobs),
        gradient=compiled_if_enabled(_gradient),
        context=copy_context(),
        cache=LogitCache(spare_memory(hidden_N.device) if differentiated and caching_allowed() else 0),
    )
    logprobs: Tensor = _LinearLogprobs.apply(hidden_N, weight, targets_N, plan)  # type: ignore[no-untyped-call]
    return logprobs


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Settings and state that the forward and the backward pass share."""

    chunks: int  # of nearly equal sizes: a last chunk of one token would be compiled separately
    sharpness: float  # 1 / temperature
    logprobs: Callable[..., Any]
    gradient: Callable[..., Any]
    context: Context  # with the compiler's settings; on a GPU, the backward pass runs in another thread
    cache: LogitCache  # for the first backward pass

    def split(self, tensor_N: Tensor) -> tuple[Tensor, ...]:
        return torch.tensor_split(tensor_N, self.chunks)

    def split_copies(self, tensor_N: Tensor) -> list[Tensor]:
        """Split and copy small tensors: a compiler would treat a view of a whole tensor as a special case."""
        return [chunk.clone() for chunk in self.split(tensor_N)]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        if self.gradient is not _gradient:
            import torch._dynamo as compiler  # slow to import

            compiler.mark_static(logits, 1)  # kernels read rows of a constant length faster
        return logits


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities of targets; (N, hidden), (V, hidden), (N,) -> (N,)."""

    @staticmethod
    def forward(ctx: Any, hidden_N: Tensor, weight: Tensor, targets_N: Tensor, plan: _Plan) -> Tensor:
        sharpness = _scalar(plan.sharpness, hidden_N)
        results = []
        chunks = zip(plan.split(hidden_N), plan.split_copies(targets_N), strict=True)
        logits: Tensor | None
        for number, (hidden, targets) in enumerate(chunks):
            logits = plan.logits(hidden, weight)
            results.append(plan.logprobs(logits, targets, sharpness))
            plan.cache.add_if_it_fits(number, logits)
            logits = None  # freed before the next chunk's are computed, unless they are cached
        logprobs_N, normalisers_N = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(hidden_N, weight, targets_N, logprobs_N, normalisers_N)
        ctx.plan = plan
        return logprobs_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:2]
        return *ctx.plan.context.run(_backward, ctx.plan, ctx.saved_tensors, gradient_N, *needed), None, None


def _backward(
    plan: _Plan, saved: tuple[Tensor, ...], gradient_N: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states and of the weight, the latter summed in place over chunks."""
    hidden_N, weight, targets_N, logprobs_N, normalisers_N = saved
    sharpness = _scalar(plan.sharpness, hidden_N)
    scaled_N = gradient_N.float() * plan.sharpness
    # expm1, because p is often nearly 1, and 1 - p of a rounded p has few correct digits
    target_gradient_N = -torch.expm1(logprobs_N) * scaled_N
    hidden_gradient_N = torch.empty_like(hidden_N) if needs_hidden else None
    weight_gradient: Tensor | None = None
    chunks = zip(
        plan.split(hidden_N),
        plan.split(targets_N),
        plan.split_copies(normalisers_N),
        plan.split_copies(-scaled_N),
        plan.split(target_gradient_N.to(hidden_N.dtype)),
        plan.split(hidden_gradient_N) if hidden_gradient_N is not None else [None] * plan.chunks,
        strict=True,
    )
    logits: Tensor | None
    for number, (hidden, targets, normalisers, scale, target_gradient, hidden_gradient) in enumerate(chunks):
        logits = plan.cache.pop(number)  # this assignment frees the previous chunk's logits
        if logits is None:
            logits = plan.logits(hidden, weight)
        plan.gradient(logits, normalisers, scale, sharpness)
        logits.scatter_(1, targets.unsqueeze(1), target_gradient.unsqueeze(1))
        if hidden_gradient is not None:
            torch.mm(logits, weight, out=hidden_gradient)
        if needs_weight and weight_gradient is None:
            weight_gradient = logits.T @ hidden
        elif weight_gradient is not None:
            weight_gradient.addmm_(logits.T, hidden)
    return hidden_gradient_N, weight_gradient


def _scalar(value: float, like: Tensor) -> Tensor:
    """Return the value as a tensor: a compiler might compile a Python float anew for every value."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


# Each of the two compiles to one kernel that reads the logits. Uncompiled, each makes one float32 copy of
# them.


def _logprobs(logits: Tensor, targets: Tensor, sharpness: Tensor) -> tuple[Tensor, Tensor]:
    """Return the targets' log-probabilities and the log-sum-exp; (N, V), (N,), () -> (N,), (N,)."""
    scaled = logits.float().mul_(sharpness)
    largest = scaled.amax(dim=-1, keepdim=True)
    total = scaled.sub_(largest).exp_().sum(dim=-1, keepdim=True)  # compiled to one pass on a GPU
    chosen = logits.gather(-1, targets.unsqueeze(-1)).float() * sharpness
    logprobs = (chosen - largest) - total.log()  # in this order small values keep their digits
    return logprobs.squeeze(-1), (total.log() + largest).squeeze(-1)


def _gradient(logits: Tensor, normalisers: Tensor, scale: Tensor, sharpness: Tensor) -> None:
    """Overwrite every logit with scale * p; (N, V), (N,), (N,), (). The target's term is not added here."""
    p = logits.float().mul_(sharpness).sub_(normalisers.unsqueeze(-1)).exp_()
    logits.copy_(p.mul_(scale.unsqueeze(-1)))


# Memory of a device that the logit cache leaves free, as a share of what this process may use, and in bytes.
# Cached logits are freed before the backward pass reaches the layers. Until then a few GiB are needed: for a
# reference policy's forward pass, a chunk's float32 logits, and gradients of hidden states and output layer.
# Not all memory that seems free is usable: blocks may be too small or belong to CUDA graphs, and other
# processes grow. If memory runs out nevertheless, that costs one attempt, and caching ends for the run.
FREE_SHARE = 0.25
MIN_FREE_BYTES = 6 * 2**30


@dataclass
class LogitCaching:
    """Whether logits may be cached within a block of code, and whether any were."""

    allowed: bool
    any_cached: bool = False


_CACHING: ContextVar[LogitCaching | None] = ContextVar("logit_caching", default=None)


@contextmanager
def logit_caching(allowed: bool) -> Iterator[LogitCaching]:
    """Allow or forbid the logit cache within the block."""
    caching = LogitCaching(allowed)
    token = _CACHING.set(caching)
    try:
        yield caching
    finally:
        _CACHING.reset(token)


def caching_allowed() -> bool:
    """Return whether logits may be cached; outside of :func:`logit_caching` blocks they may."""
    caching = _CACHING.get()
    return caching is None or caching.allowed


def spare_memory(device: torch.device) -> int:
    """Return how many bytes of a GPU the logit cache may use; 0 on other devices."""
    if device.type != "cuda":
        return 0
    unused, total = unused_memory(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)  # default: all
    available = min(unused, allowed - torch.cuda.memory_allocated(device))
    return max(0, available - max(int(FREE_SHARE * allowed), MIN_FREE_BYTES))


class LogitCache:
    """Logits of some chunks, by number. The first chunks are cached: the backward pass frees them first."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        self._logits: dict[int, Tensor] = {}

    def add_if_it_fits(self, chunk: int, logits: Tensor) -> None:
        """Cache a chunk's logits if there is memory for them."""
        if logits.nbytes <= self._free_bytes:
            self._free_bytes -= logits.nbytes
            self._logits[chunk] = logits
            if (caching := _CACHING.get()) is not None:
                caching.any_cached = True

    def pop(self, chunk: int) -> Tensor | None:
        """Remove and return a chunk's logits, because the backward pass overwrites them."""
        return self._logits.pop(chunk, None)
