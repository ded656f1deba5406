"""When the hand-written backward pass is used, and that a learner gets the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings
from hacrl.models import lm_head as output_layer
from hacrl.models.lm_head import is_plain_linear, linear_logprobs
from hacrl.models.logprobs import response_logprobs
from hacrl.training.learner import Learner
from hacrl.training.offload import Transfers
from hacrl.types import Sampling
from tests.models.linear_case import VOCABULARY, Case, Products, set_spare_memory
from tests.support.compiler import use_compiler
from tests.support.late_transfers import LateTransfers
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import sample

compiler_looks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
traced = partial(torch.compile, backend="aot_eager")


def lead(_: nn.Module, given: tuple[Tensor, ...]) -> None:
    """A hook without effect."""


class Scaled(nn.Linear):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) * 2


def of(change: Callable[[nn.Linear], object]) -> nn.Linear:
    head = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
    change(head)
    return head


def test_which_output_layers_are_plain() -> None:
    hidden = torch.zeros(3, 4, dtype=torch.bfloat16)
    plain = of(lambda head: None)
    for sampling in (Sampling(8), Sampling(8, 0.0), Sampling(8, 0.7)):
        assert is_plain_linear(plain, hidden, sampling)
    assert is_plain_linear(plain.half(), hidden.half(), Sampling(8))
    plain.bfloat16()
    assert not is_plain_linear(plain, hidden, Sampling(8, top_k=3))
    assert not is_plain_linear(plain, hidden, Sampling(8, top_p=0.9))
    assert not is_plain_linear(plain, hidden.float(), Sampling(8))
    assert not is_plain_linear(plain.float(), hidden.float(), Sampling(8))
    plain.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_plain_linear(plain, hidden, Sampling(8))
    others = [
        nn.Linear(4, 6, dtype=torch.bfloat16),
        Scaled(4, 6, bias=False, dtype=torch.bfloat16),
        nn.Sequential(plain),
        of(lambda head: head.register_forward_hook(lambda _, given, made: made * 2)),
        of(lambda head: head.register_forward_pre_hook(lead)),
        of(lambda head: head.register_full_backward_hook(lambda *_: None)),
        of(lambda head: head.register_full_backward_pre_hook(lambda *_: None)),
        of(lambda head: setattr(head, "forward", lambda given: given)),
        of(lambda head: nn.utils.parametrizations.weight_norm(head)),
    ]
    assert [is_plain_linear(head, hidden, Sampling(8)) for head in others] == [False] * len(others)


def refuse(*_: object) -> Tensor:
    raise AssertionError("not here")


def test_a_cpu_uses_autograd(monkeypatch) -> None:
    case = Case()
    expected = case.by_autograd(Sampling(8))
    logits = nn.functional.linear(case.hidden, case.weight).float()
    plain = logits.gather(1, case.targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1)
    gradients = torch.autograd.grad(plain, (case.hidden, case.weight), case.above)
    monkeypatch.setattr(output_layer, "linear_logprobs", refuse)
    for found in (expected, case.by_autograd(Sampling(8))):
        assert all(map(torch.equal, found, (plain, *gradients)))
    monkeypatch.setattr(output_layer, "MANUAL_BACKWARD_DEVICES", ("cpu",))
    with pytest.raises(AssertionError, match="not here"):
        case.by_autograd(Sampling(8))
    case.by_autograd(Sampling(8, top_k=5))
    case.head.bias = nn.Parameter(torch.zeros(VOCABULARY).bfloat16())
    case.by_autograd(Sampling(8))


def add_to(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


def learnt(
    on: tuple[str, ...],
    compiling: bool,
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: bool = False,
    offload_to: Transfers | None = None,
):
    """Return float32 gradients by parameter, statistics, and how often the hand-written pass was used."""
    calls: list[int] = []

    def counted(*arguments) -> Tensor:
        calls.append(1)
        return linear_logprobs(*arguments)

    monkeypatch.setattr(output_layer, "MANUAL_BACKWARD_DEVICES", on)
    monkeypatch.setattr(output_layer, "linear_logprobs", counted)
    agent = sharpened(char_agent(), 10.0)
    agent.model.to(torch.bfloat16)
    if checkpointing:
        agent.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sums = {name: torch.zeros(p.shape) for name, p in agent.model.named_parameters()}
    for name, parameter in agent.model.named_parameters():
        parameter.register_hook(partial(add_to, sums[name]))
    settings = LearningSettings(micro_batch_tokens=40, compile=compiling, max_grad_norm=1e9)
    method = make_method(GspoSettings(clip_low=0.99, clip_high=9))
    given = [sample(agent, which % 5, ratio=1.0, advantage=1.0 - which % 3) for which in range(12)]
    stats = Learner(agent, method, settings, Sampling(8), offload_to=offload_to).learn(given, 1, 0)
    assert stats.notes == []
    return sums, stats, len(calls)


@compiler_looks
@pytest.mark.parametrize("compiling", [False, True])
def test_a_learner_gets_the_same_gradients(monkeypatch, compiling) -> None:
    """One update in bfloat16, with micro-batches of several chunks."""
    use_compiler(monkeypatch, traced)
    for name in ("MAX_LOGITS", "MAX_COMPILED_LOGITS"):
        monkeypatch.setattr(output_layer, name, 60)
    expected, stats, calls = learnt((), compiling, monkeypatch)
    assert calls == 0
    found, stats_again, calls = learnt(("cpu",), compiling, monkeypatch)
    assert calls > 1
    assert stats_again.losses == pytest.approx(stats.losses, abs=1e-4)
    assert stats_again.grad_norms == pytest.approx(stats.grad_norms, rel=0.01)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_a_learner_that_keeps_logits_learns_the_same_to_the_bit(monkeypatch) -> None:
    """No logits are kept by a learner that saves memory by gradient checkpointing or offloading."""
    monkeypatch.setattr(output_layer, "MAX_LOGITS", 60)  # two tokens' of 22 each
    expected, stats, calls = learnt(("cpu",), False, monkeypatch)
    made = {}
    spared = {
        "nothing": {},
        "layers": {"checkpointing": True},
        "optimizer": {"offload_to": LateTransfers(torch.device("cpu"))},
    }
    for (what, how), room in product(spared.items(), (0, 10**9)):
        asked = set_spare_memory(monkeypatch, room)
        with Products() as products:
            sums, again, _ = learnt(("cpu",), False, monkeypatch, **how)
        assert all(torch.equal(sums[name], expected[name]) for name in expected)
        assert (again.losses, again.grad_norms) == (stats.losses, stats.grad_norms)
        assert len(asked) == (calls if what == "nothing" else 0)  # once a micro-batch
        made[what, room] = sum(shape in ((1, 22), (2, 22)) for shape in products.shapes)
    assert made["nothing", 10**9] > 2 * calls > 2
    assert [made[what, room] // made["nothing", 10**9] for what, room in made] == [2, 1, 2, 2, 2, 2]


def test_responses_of_a_real_model(monkeypatch) -> None:
    agent = sharpened(char_agent(), 5.0)
    agent.model.to(torch.bfloat16)
    pairs = [((1, 2, 3), (4, 5)), ((6,), (7, 8, 9, 10, 11, 12)), ((5, 1), (9, 9, 9))]
    monkeypatch.setattr(output_layer, "MAX_LOGITS", 60)
    found: list[Tensor] = []
    for on in ((), ("cpu",)):
        monkeypatch.setattr(output_layer, "MANUAL_BACKWARD_DEVICES", on)
        with torch.no_grad():
            found.append(response_logprobs(agent.model, pairs, Sampling(8, 0.7), agent.device)[0])
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
