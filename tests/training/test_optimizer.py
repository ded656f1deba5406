"""Master weights: the updates of a float32 optimizer, for parameters of any precision."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hacrl.training.optimizer import MasterWeightAdamW
from tests.support.tiny import char_agent, pair_tokenizer, tiny_llama

BETAS = (0.9, 0.999)


def parameter(values: Sequence[float], dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def adamw(parameters: Sequence[Tensor], lr: float, weight_decay: float = 0.0) -> MasterWeightAdamW:
    return MasterWeightAdamW(parameters, lr, BETAS, weight_decay)


def masters(optimizer: MasterWeightAdamW) -> list[Tensor]:
    return optimizer.masters


def update(optimizer: MasterWeightAdamW, *losses: Tensor) -> None:
    optimizer.zero_gradients()
    for loss in losses:
        loss.backward()
    optimizer.step()


def test_small_steps_are_lost_on_bfloat16_and_kept_by_the_masters() -> None:
    # between 1 and 2, bfloat16 numbers are 2**-7 = 0.0078 apart; a step of 1e-6 is lost 3,900 times over
    plain, mastered = parameter([1.0, 1.5]), parameter([1.0, 1.5])
    lost = torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0)
    kept = adamw([mastered], lr=1e-6)
    for _ in range(10):
        plain.grad = torch.ones_like(plain)
        lost.step()
        update(kept, mastered.sum())
    assert plain.tolist() == [1.0, 1.5]
    # a constant gradient makes Adam step by the learning rate: 10 * 1e-6
    assert masters(kept)[0].tolist() == pytest.approx([1.0 - 1e-5, 1.5 - 1e-5], abs=1e-6)
    assert mastered.tolist() == [1.0, 1.5]  # not yet visible


def test_parameters_change_when_the_rounded_masters_do() -> None:
    # below 1 the numbers are 2**-8 apart: 1 becomes 1 - 2**-8 when the master passes the middle, 1 - 2**-9,
    # which is 0.00195 away: after 20 steps of 1e-4
    value = parameter([1.0])
    optimizer = adamw([value], lr=1e-4)
    seen = []
    for _ in range(25):
        update(optimizer, value.sum())
        seen.append(value.item())
    assert seen == [1.0] * 19 + [1.0 - 2**-8] * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_masters_equal_a_float32_adamw_fed_the_same_gradients(
    dtype: torch.dtype, weight_decay: float
) -> None:
    torch.manual_seed(0)
    start = [torch.randn(3, 4).to(dtype), torch.randn(5).to(dtype)]
    mine = [nn.Parameter(value.clone()) for value in start]
    plain = [nn.Parameter(value.float()) for value in start]
    optimizer = adamw(mine, lr=1e-3, weight_decay=weight_decay)
    expected = torch.optim.AdamW(plain, lr=1e-3, betas=BETAS, weight_decay=weight_decay)
    for _ in range(20):
        gradients = [torch.randn_like(value) for value in start]
        update(optimizer, sum((p * g).float().sum() for p, g in zip(mine, gradients, strict=True)))
        for p, g in zip(plain, gradients, strict=True):
            p.grad = g.float()
        expected.step()
        for master, p, rounded in zip(masters(optimizer), plain, mine, strict=True):
            assert torch.equal(master, p)
            assert torch.equal(rounded, p.to(dtype))


def test_micro_batches_are_summed_in_float32() -> None:
    # 1 + 2**-9 eight times is 1 + 2**-6 = 1.015625; in bfloat16 every addend is less than half the
    # distance 2**-7 to the next number and is lost
    value = parameter([0.0])
    optimizer = adamw([value], lr=1e-3)
    optimizer.zero_gradients()
    summed = torch.zeros(1, dtype=torch.bfloat16)
    for gradient in [1.0] + [2**-9] * 8:
        (value * gradient).sum().backward()
        summed += gradient
        assert value.grad is None  # freed at once
    assert summed.item() == 1.0
    assert optimizer.gradients[0].item() == 1.015625


def test_an_update_starts_from_zero() -> None:
    value = parameter([2.0])
    optimizer = adamw([value], lr=1e-3)
    for _ in range(2):
        update(optimizer, (value * 3).sum())
        assert optimizer.gradients[0].item() == 3.0
    value.grad = torch.ones_like(value)  # not of this update
    update(optimizer, (value * 3).sum())
    assert optimizer.gradients[0].item() == 3.0


def test_float32_parameters_are_their_own_masters_bit_for_bit() -> None:
    mine, plain = char_agent().model, char_agent().model
    optimizer = adamw(list(mine.parameters()), lr=1e-3, weight_decay=0.1)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.1)
    ids = torch.tensor([[4, 13, 12, 21, 5, 1]])
    for _ in range(5):
        update(optimizer, *(mine(ids[:, :width]).logits.square().mean() for width in (6, 3)))
        expected.zero_grad()
        for width in (6, 3):
            plain(ids[:, :width]).logits.square().mean().backward()
        expected.step()
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
    assert all(master is p for master, p in zip(masters(optimizer), mine.parameters(), strict=True))


def test_both_kinds_of_parameters_in_one_optimizer() -> None:
    half, full = parameter([1.0]), parameter([1.0], torch.float32)
    optimizer = adamw([half, full], lr=1e-4)
    update(optimizer, (half.float() * full).sum())
    assert full.item() == masters(optimizer)[0].item() == pytest.approx(1 - 1e-4, abs=1e-7)
    assert half.item() == 1.0


def test_a_weight_used_twice_gets_the_sum_of_its_gradients_once() -> None:
    # 3 w + 5 w = 8 w
    value = parameter([1.0])
    optimizer = adamw([value], lr=1e-3)
    optimizer.zero_gradients()
    ((value * 3).sum() + (value * 5).sum()).backward()
    assert optimizer.gradients[0].item() == 8.0


def test_tied_embeddings_have_one_master_with_both_gradients() -> None:
    config = tiny_llama(pair_tokenizer()).config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    tied = type(tiny_llama(pair_tokenizer()))(config).to(torch.bfloat16).eval()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    ids = torch.tensor([[4, 13, 12, 21]])
    parameters = list(tied.parameters())
    expected = torch.autograd.grad(tied(ids).logits.float().square().mean(), parameters)
    optimizer = adamw(parameters, lr=1e-3)
    optimizer.zero_gradients()
    tied(ids).logits.float().square().mean().backward()
    for summed, gradient in zip(optimizer.gradients, expected, strict=True):
        assert torch.equal(summed, gradient.float())
    embedding = next(i for i, p in enumerate(parameters) if p is tied.lm_head.weight)
    asked = optimizer.gradients[embedding].abs().sum(dim=-1)
    assert asked[4] > 0  # as input ...
    assert asked[100] > 0  # ... and as output only
    optimizer.step()
    assert torch.equal(tied.lm_head.weight, tied.model.embed_tokens.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipping_by_hand(dtype: torch.dtype) -> None:
    one, other = parameter([0.0, 0.0], dtype), parameter([0.0], dtype)
    optimizer = adamw([one, other], lr=1e-3)
    optimizer.zero_gradients()
    (one @ torch.tensor([2.0, 3.0], dtype=dtype) + 6 * other).sum().backward()
    # the norm over all parameters is sqrt(4 + 9 + 36) = 7; scaled to 3.5 all are halved
    assert optimizer.clip_gradients(3.5) == 7.0
    gradients = [value for gradient in optimizer.gradients for value in gradient.tolist()]
    assert gradients == pytest.approx([1.0, 1.5, 3.0], rel=1e-6)
    assert optimizer.clip_gradients(100.0) == pytest.approx(3.5, rel=1e-6)  # and now none is
    gradients = [value for gradient in optimizer.gradients for value in gradient.tolist()]
    assert gradients == pytest.approx([1.0, 1.5, 3.0], rel=1e-6)


def test_an_update_without_signal_applies_the_momentum() -> None:
    value, plain = parameter([1.0]), parameter([1.0], torch.float32)
    optimizer = adamw([value], lr=1e-3)
    expected = torch.optim.AdamW([plain], lr=1e-3, betas=BETAS, weight_decay=0.0)
    for gradient in (1.0, 0.0, 0.0):
        update(optimizer, *([(value * gradient).sum()] if gradient else []))
        plain.grad = torch.tensor([gradient])
        expected.step()
        assert torch.equal(masters(optimizer)[0], plain)


def test_two_optimizers_may_take_turns_on_the_same_parameters() -> None:
    """Training the same agent in a second run, the first still in memory."""
    value = parameter([1.0])
    first, second = adamw([value], lr=1e-2), adamw([value], lr=1e-2)
    for optimizer in (first, second, first):
        update(optimizer, (value * 2).sum())
        assert optimizer.gradients[0].item() == 2.0
    (value * 2).sum().backward()  # outside of any update the gradient stays
    assert value.grad.item() == 2.0


def test_a_state_from_before_the_first_update_is_restored() -> None:
    weight, other = parameter([1.0, 1.5]), parameter([1.0, 1.5])
    used, fresh = adamw([weight], lr=1e-2), adamw([other], lr=1e-2)
    beginning = {name: value.clone() for name, value in fresh.tensors().items()}
    for _ in range(3):
        update(used, (weight.float() ** 2).sum())
    used.load_tensors(beginning)
    for optimizer, mine in ((used, weight), (fresh, other)):
        update(optimizer, (mine.float() * 3).sum())
    assert {name: value.tolist() for name, value in used.tensors().items()} == {
        name: value.tolist() for name, value in fresh.tensors().items()
    }
