"""From hidden states to log-probabilities, a piece at a time.

Logits over a large vocabulary would take most of a learner's memory. They are made for a piece of the tokens
at a time, and again in the backward pass; where a GPU has room for more, they may wait for it instead.

Log-probabilities by a plain linear output layer in 16 bits, with a backward pass written out by hand.

Left to autograd, every piece of the tokens takes its log-sum-exp twice, writes a zero for every token that
was not chosen, and makes a gradient as large as the output layer, which is then added to the others'.

Logits that wait for the backward pass, as many as a GPU has room for; the others are made again in it.

Nothing counts on them: estimates and plans are made without, and what is kept takes only what is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hacrl.models.compile import compiled_if_wanted
from hacrl.models.device import unused_memory
from hacrl.models.packing import can_be_ragged, model_inputs, ragged, whole_sequences
from hacrl.models.sampling import token_logprobs
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


def is_plain_linear(head: Any, hidden: Tensor, sampling: Sampling) -> TypeGuard[nn.Linear]:
    """Whether logits are the hidden states times a matrix in 16 bits, and all tokens may be sampled."""
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return False
    if type(head.weight) is not nn.Parameter:  # e.g. one that is spread over several devices
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
    hidden_N: Tensor, weight: Tensor, targets_N: Tensor, temperature: float, most_logits: int
) -> Tensor:
    """log-probability of each target, (N, hidden), (V, hidden), (N,) -> (N,) in float32.

    In the backward pass a piece's logits become their gradient where they are, so that no more than
    ``most_logits`` exist at a time, but for those that are kept because there is room. No number depends on
    how many are. A temperature of 0 is 1, as where tokens are drawn.
    """
    size = max(1, most_logits // len(weight))
    differentiated = torch.is_grad_enabled() and (hidden_N.requires_grad or weight.requires_grad)
    plan = _Plan(
        pieces=max(1, -(-len(hidden_N) // size)),
        sharpness=1 / temperature if temperature else 1.0,
        logprobs=compiled_if_wanted(_logprobs),
        gradient=compiled_if_wanted(_gradient),
        context=copy_context(),
        kept=KeptLogits(room(hidden_N.device) if differentiated and may_wait() else 0),
    )
    logprobs: Tensor = _LinearLogprobs.apply(hidden_N, weight, targets_N, plan)  # type: ignore[no-untyped-call]
    return logprobs


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What both passes have to agree on, and what the one leaves to the other."""

    pieces: int  # of nearly the same size: a last one of one token would be compiled apart
    sharpness: float  # 1 / temperature
    logprobs: Callable[..., Any]
    gradient: Callable[..., Any]
    context: Context  # with the compiler's settings; on a GPU, the backward pass is another thread
    kept: KeptLogits  # for the first backward pass

    def of(self, tensor_N: Tensor) -> tuple[Tensor, ...]:
        return torch.tensor_split(tensor_N, self.pieces)

    def copies_of(self, tensor_N: Tensor) -> list[Tensor]:
        """Small ones: the compiler takes a view apart from one that is all there is."""
        return [piece.clone() for piece in self.of(tensor_N)]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        if self.gradient is not _gradient:
            import torch._dynamo as compiler  # slow to import

            compiler.mark_static(logits, 1)  # rows of a known length are read faster
        return logits


class _LinearLogprobs(torch.autograd.Function):
    """(N, hidden), (V, hidden), (N,) -> (N,)."""

    @staticmethod
    def forward(ctx: Any, hidden_N: Tensor, weight: Tensor, targets_N: Tensor, plan: _Plan) -> Tensor:
        sharpness = _scalar(plan.sharpness, hidden_N)
        found = []
        pieces = zip(plan.of(hidden_N), plan.copies_of(targets_N), strict=True)
        logits: Tensor | None
        for number, (hidden, targets) in enumerate(pieces):
            logits = plan.logits(hidden, weight)
            found.append(plan.logprobs(logits, targets, sharpness))
            plan.kept.offer(number, logits)
            logits = None  # unless they are kept, gone before the next are made
        logprobs_N, normalisers_N = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden_N, weight, targets_N, logprobs_N, normalisers_N)
        ctx.plan = plan
        return logprobs_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:2]
        return *ctx.plan.context.run(_backward, ctx.plan, ctx.saved_tensors, gradient_N, *wanted), None, None


def _backward(
    plan: _Plan, saved: tuple[Tensor, ...], gradient_N: Tensor, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the hidden states and, added up over the pieces where it is, of the weight."""
    hidden_N, weight, targets_N, logprobs_N, normalisers_N = saved
    sharpness = _scalar(plan.sharpness, hidden_N)
    scaled_N = gradient_N.float() * plan.sharpness
    # p is nearly 1 where a model is sure: 1 - p of a rounded p would be left with few digits
    of_target_N = -torch.expm1(logprobs_N) * scaled_N
    hidden_gradient_N = torch.empty_like(hidden_N) if wants_hidden else None
    weight_gradient: Tensor | None = None
    pieces = zip(
        plan.of(hidden_N),
        plan.of(targets_N),
        plan.copies_of(normalisers_N),
        plan.copies_of(-scaled_N),
        plan.of(of_target_N.to(hidden_N.dtype)),
        plan.of(hidden_gradient_N) if hidden_gradient_N is not None else [None] * plan.pieces,
        strict=True,
    )
    logits: Tensor | None
    for number, (hidden, targets, normalisers, scale, of_target, hidden_gradient) in enumerate(pieces):
        logits = plan.kept.take(number)  # from here on, those before are gone
        if logits is None:
            logits = plan.logits(hidden, weight)
        plan.gradient(logits, normalisers, scale, sharpness)
        logits.scatter_(1, targets.unsqueeze(1), of_target.unsqueeze(1))
        if hidden_gradient is not None:
            torch.mm(logits, weight, out=hidden_gradient)
        if wants_weight and weight_gradient is None:
            weight_gradient = logits.T @ hidden
        elif weight_gradient is not None:
            weight_gradient.addmm_(logits.T, hidden)
    return hidden_gradient_N, weight_gradient


def _scalar(value: float, like: Tensor) -> Tensor:
    """On the device: a Python float might be compiled anew for every value."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


# Both are compiled to one kernel that reads the logits; done plainly, each makes one float32 copy of them.


def _logprobs(logits: Tensor, targets: Tensor, sharpness: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the targets, and log-sum-exp of all; (N, V), (N,), () -> (N,), (N,)."""
    scaled = logits.float().mul_(sharpness)
    largest = scaled.amax(dim=-1, keepdim=True)
    total = scaled.sub_(largest).exp_().sum(dim=-1, keepdim=True)  # torch compiles this to one pass on a GPU
    chosen = logits.gather(-1, targets.unsqueeze(-1)).float() * sharpness
    logprobs = (chosen - largest) - total.log()  # in this order a small one keeps its digits
    return logprobs.squeeze(-1), (total.log() + largest).squeeze(-1)


def _gradient(logits: Tensor, normalisers: Tensor, scale: Tensor, sharpness: Tensor) -> None:
    """scale * p of every token, in place of its logit; (N, V), (N,), (N,), (). Targets are not told apart."""
    p = logits.float().mul_(sharpness).sub_(normalisers.unsqueeze(-1)).exp_()
    logits.copy_(p.mul_(scale.unsqueeze(-1)))


# Left free, of what this process may have of a device. Kept logits are gone before the backward pass comes to
# the layers; until then there are a reference's forward pass, a piece's logits in float32, and gradients of
# hidden states and of the output layer: a few GiB, whatever the size of the device. Nor can all be had that
# looks free: some lies in blocks too small or belongs to recorded graphs, and other processes grow. Memory
# that runs out costs an attempt, and no logits are kept for the rest of the run.
LEFT_FREE = 0.25
LEAST_LEFT_FREE = 6 * 2**30  # bytes


@dataclass
class Waiting:
    """What is said of logits for a block of code, and what became of them."""

    allowed: bool
    any_kept: bool = False


_WAITING: ContextVar[Waiting | None] = ContextVar("waiting_logits", default=None)


@contextmanager
def logits_may_wait(allowed: bool) -> Iterator[Waiting]:
    """Within the block, logits are kept if there is room, or none are: memory is to be spared."""
    waiting = Waiting(allowed)
    token = _WAITING.set(waiting)
    try:
        yield waiting
    finally:
        _WAITING.reset(token)


def may_wait() -> bool:
    """See :func:`logits_may_wait`; outside of its blocks they may."""
    waiting = _WAITING.get()
    return waiting is None or waiting.allowed


def room(device: torch.device) -> int:
    """Bytes of a device that will not be missed; none but on a GPU."""
    if device.type != "cuda":
        return 0
    unused, total = unused_memory(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)  # all, unless somebody says so
    available = min(unused, allowed - torch.cuda.memory_allocated(device))
    return max(0, available - max(int(LEFT_FREE * allowed), LEAST_LEFT_FREE))


class KeptLogits:
    """Of some pieces, by their number. The first are kept: the backward pass lets go of them first."""

    def __init__(self, room: int) -> None:
        self._room = room  # bytes
        self._logits: dict[int, Tensor] = {}

    def offer(self, piece: int, logits: Tensor) -> None:
        """Keep them if there is room."""
        if logits.nbytes <= self._room:
            self._room -= logits.nbytes
            self._logits[piece] = logits
            if (waiting := _WAITING.get()) is not None:
                waiting.any_kept = True

    def take(self, piece: int) -> Tensor | None:
        """Only once, since whoever takes them overwrites them: another backward pass makes its own."""
        return self._logits.pop(piece, None)
