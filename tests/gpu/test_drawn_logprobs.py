"""Drawn tokens' log-probabilities in vLLM by our kernels, on a GPU. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from hacrl.rollout.vllm.own_logprobs import name_in, with_own_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 30), (3, 8192), (256, 151_936), (17, 262_147)])
def test_they_are_those_of_the_logits(rows, vocabulary, dtype) -> None:
    from hacrl.rollout.vllm.drawn_logprobs import drawn_logprobs, is_right, plain_logprobs

    generator = torch.Generator(GPU).manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator, device=GPU).mul(5).to(dtype)
    tokens = torch.randint(vocabulary, (rows,), generator=generator, device=GPU)
    logits[-1] = -torch.inf  # but for what top-k has left
    logits[-1, tokens[-1]] = 3.0
    found, ranks = drawn_logprobs(logits, tokens)
    exact, counted = plain_logprobs(logits, tokens)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks, counted)
    assert is_right(GPU, dtype)


def test_vllms_kernels_say_the_same() -> None:
    logprob = pytest.importorskip("vllm.v1.worker.gpu.sample.logprob")
    outputs = pytest.importorskip("vllm.v1.outputs")
    theirs = getattr(logprob, name_in(logprob))
    ours = with_own_kernels(lambda *given: pytest.fail("they were asked"), outputs.LogprobsTensors)
    logits = torch.randn(64, 151_936, device=GPU) * 5
    given = logits, 0, torch.randint(151_936, (64,), device=GPU), None
    mine, other = ours(*given), theirs(*given)
    torch.testing.assert_close(mine.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine.logprob_token_ids, other.logprob_token_ids)
    assert torch.equal(mine.selected_token_ranks, other.selected_token_ranks)
