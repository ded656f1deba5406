"""The output layer's backward pass by hand on a GPU: numbers of a plain computation, and little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hacrl.models import lm_head as output_layer
from hacrl.models.compile import compiled
from hacrl.models.lm_head import chunked_logprobs, is_plain_linear, spare_memory
from hacrl.types import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler looks at them
]
TOKENS, WIDTH, VOCABULARY = 4000, 256, 32_000
PIECE = 1334  # of 4000 tokens: pieces of 1334, 1333 and 1333
COMPILING = pytest.mark.parametrize("compiling", [False, True])


class Case:
    """Tokens of an embedding that may be the output layer's, too; what is between is a product."""

    def __init__(self, tied: bool) -> None:
        random = torch.Generator("cuda").manual_seed(0)
        options = {"generator": random, "device": "cuda"}
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="cuda", dtype=torch.bfloat16)
        self.head.weight.data.normal_(std=0.15, generator=random)
        self.embedding = self.head.weight if tied else nn.Parameter(self.head.weight.detach().roll(1, 0))
        self.ids = torch.randint(VOCABULARY, (TOKENS,), **options)
        self.factor = torch.rand(WIDTH, **options).mul(8).bfloat16()
        self.targets = torch.randint(VOCABULARY, (TOKENS,), **options)
        self.above = torch.randn(TOKENS, **options)

    @property
    def weights(self) -> list[nn.Parameter]:
        return (
            [self.head.weight] if self.embedding is self.head.weight else [self.head.weight, self.embedding]
        )

    def hidden(self) -> Tensor:
        states = nn.functional.embedding(self.ids, self.embedding) * self.factor
        return states.detach().requires_grad_()

    def found(self, sampling: Sampling) -> tuple[Tensor, list[Tensor]]:
        hidden = nn.functional.embedding(self.ids, self.embedding) * self.factor
        assert is_plain_linear(self.head, hidden, sampling)
        logprobs = chunked_logprobs(self.head, hidden, self.targets, sampling, VOCABULARY)
        return logprobs.detach(), list(torch.autograd.grad(logprobs, self.weights, self.above))

    def plain(self, temperature: float) -> tuple[Tensor, list[Tensor]]:
        """In float32, all at once, from hidden states as they are in 16 bits."""
        weights = [weight.detach().float().requires_grad_() for weight in self.weights]
        hidden = nn.functional.embedding(self.ids, weights[-1]) * self.factor.float()
        hidden = hidden + (hidden.bfloat16().float() - hidden).detach()
        logits = hidden @ weights[0].T / temperature
        logprobs = logits.log_softmax(-1).gather(1, self.targets.unsqueeze(1)).squeeze(1)
        return logprobs.detach(), list(torch.autograd.grad(logprobs, weights, self.above))


@contextmanager
def in_pieces(
    monkeypatch: pytest.MonkeyPatch,
    compiling: bool,
    by_hand: bool = True,
    piece: int = PIECE,
    kept: float | None = None,
) -> Iterator[None]:
    """``kept``: there is room for the logits of so many pieces; None: as there is."""
    with monkeypatch.context() as patch, compiled(nn.Module(), compiling):
        for name in ("MAX_LOGITS", "MAX_COMPILED_LOGITS"):
            patch.setattr(output_layer, name, piece * VOCABULARY)
        if not by_hand:
            patch.setattr(output_layer, "MANUAL_BACKWARD_DEVICES", ())
        if kept is not None:
            patch.setattr("hacrl.models.lm_head.spare_memory", lambda _: int(kept * 2 * piece * VOCABULARY))
        yield


@COMPILING
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_as_near_to_a_plain_computation_as_autograd(monkeypatch, temperature, tied, compiling) -> None:
    case, sampling = Case(tied), Sampling(8, temperature)
    values, gradients = case.plain(temperature)
    with in_pieces(monkeypatch, compiling):
        found, by_hand = case.found(sampling)
    with in_pieces(monkeypatch, compiling, by_hand=False):
        before, by_autograd = case.found(sampling)
    assert (found - values).norm() < 1.05 * (before - values).norm()
    # logits of up to 32 are 2**-3 apart, each off by half of that at most; and once more by the sum of all
    assert (found - values).abs().max() < 0.1 / temperature
    for new, old, exact in zip(by_hand, by_autograd, gradients, strict=True):
        assert (new - exact).norm() < 1.02 * (old - exact).norm()
        assert (new - exact).norm() < 0.03 * exact.norm()


@COMPILING
def test_pieces_and_passes_without_gradients_give_the_same(monkeypatch, compiling) -> None:
    case, sampling = Case(tied=False), Sampling(8, 0.7)
    with in_pieces(monkeypatch, compiling):
        pieces, gradients = case.found(sampling)
        with torch.no_grad():
            again = chunked_logprobs(case.head, case.hidden(), case.targets, sampling, VOCABULARY)
    assert torch.equal(again, pieces)
    with compiled(nn.Module(), compiling):
        whole, at_once = case.found(sampling)
    torch.testing.assert_close(pieces, whole, atol=0.1, rtol=0)  # another kernel may round logits otherwise
    for some, all_of_them in zip(gradients, at_once, strict=True):
        assert (some - all_of_them).norm() < 0.02 * all_of_them.norm()


@COMPILING
def test_kept_logits_change_no_number(monkeypatch, compiling) -> None:
    case, sampling = Case(tied=False), Sampling(8, 0.7)
    found = []
    for kept in (0, 1, 2.5, 3):
        hidden = case.hidden()
        with in_pieces(monkeypatch, compiling, kept=kept):
            logprobs = chunked_logprobs(case.head, hidden, case.targets, sampling, VOCABULARY)
            gradients = torch.autograd.grad(logprobs, [hidden, case.head.weight], case.above)
        found.append((logprobs, *gradients))
    for some in found[1:]:
        assert all(map(torch.equal, some, found[0]))


@COMPILING
@pytest.mark.parametrize("kept", [0, 2, 3])
def test_memory_is_that_of_few_pieces_and_of_those_kept(monkeypatch, kept, compiling) -> None:
    case, sampling = Case(tied=False), Sampling(8)
    piece = 2 * PIECE * VOCABULARY  # bytes of logits in 16 bits: 81 MiB; the weight has 16 MiB

    def beyond_held() -> tuple[int, int, int]:
        """At most, after the forward pass, and at the end."""
        hidden = case.hidden()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        found = chunked_logprobs(case.head, hidden, case.targets, sampling, VOCABULARY)
        between = torch.cuda.memory_allocated()
        torch.autograd.grad(found, [hidden, case.head.weight], case.above)
        most, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        return most - held, between - held, after - held

    with in_pieces(monkeypatch, compiling, kept=kept):
        beyond_held()  # whatever is made once
        most, between, after = beyond_held()
    made = case.head.weight.nbytes + 2**22  # gradients of the weight and of hidden states, and lists
    copies = 1 if compiling else 3  # not compiled, also one in float32
    others = copies - (kept == 3)  # the last is one of those that are made anyway
    assert most < made + (kept + others + 0.5) * piece  # room for what matrix products need
    assert most > max(kept, 1) * piece * 0.99
    assert between == pytest.approx(kept * piece, abs=2**22)
    assert after < 2**22


def test_room_is_what_others_leave() -> None:
    gpu, size = torch.device("cuda", 0), 2**30
    torch.cuda.empty_cache()
    before = spare_memory(gpu)
    if before < 4 * size:
        pytest.skip("somebody else uses the GPU")
    taken = torch.empty(size, dtype=torch.uint8, device=gpu)
    assert before - spare_memory(gpu) == pytest.approx(size, abs=2**28)
    del taken
    assert spare_memory(gpu) == pytest.approx(before, abs=2**28)  # torch has it still, but nobody needs it
    total = torch.cuda.get_device_properties(gpu).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**25) / total)
        assert spare_memory(gpu) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_nothing_waits_for_the_gpu_and_nothing_is_compiled_twice(monkeypatch) -> None:
    from torch._dynamo.utils import counters

    case = Case(tied=False)
    torch._dynamo.reset()
    counters.clear()
    for piece, temperature, mode in ((PIECE, 1.0, "default"), (PIECE, 0.6, "error"), (1000, 1.0, "error")):
        given = case.hidden()
        with in_pieces(monkeypatch, True, piece=piece):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                sampling = Sampling(8, temperature)
                found = chunked_logprobs(case.head, given, case.targets, sampling, VOCABULARY)
                torch.autograd.grad(found, [given, case.head.weight], case.above)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == 2


def test_what_is_not_finite_shows(monkeypatch) -> None:
    case = Case(tied=False)
    with torch.no_grad():
        case.embedding[case.ids[5]] = float("nan")
    with in_pieces(monkeypatch, compiling=True):
        values, (of_head, of_embedding) = case.found(Sampling(8))
    assert values.isnan()[5]
    assert int(values.isnan().sum()) == int((case.ids == case.ids[5]).sum())
    assert of_head.isnan().any()
    assert of_embedding[case.ids[5]].isnan().all()
