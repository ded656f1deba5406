"""Drawn tokens' log-probabilities in vLLM by our kernels, run by Triton's interpreter."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hacrl.rollout.vllm import own_logprobs
from hacrl.rollout.vllm.own_logprobs import (
    FUNCTIONS,
    NEEDED,
    WITHOUT_EFFECT,
    are_of_drawn_alone,
    take_over_logprobs,
)
from tests.support.interpreted import interpreted
from tests.vllm.marks import IN_VLLM

KERNELS = """
import math, torch
from hacrl.rollout.vllm.drawn_logprobs import PIECE, drawn_logprobs, is_right, plain_logprobs

# by hand: probabilities 0.1, 0.2, 0.3, 0.4, of which three are at least 0.2; and four equal ones
logits = torch.stack([torch.tensor([1.0, 2.0, 3.0, 4.0]).log() + 50, torch.zeros(4)])
logprobs, ranks = drawn_logprobs(logits, torch.tensor([1, 2]))
torch.testing.assert_close(logprobs, torch.tensor([math.log(0.2), math.log(0.25)]), rtol=1e-5, atol=1e-5)
assert ranks.tolist() == [3, 4] and ranks.dtype == torch.int64

torch.manual_seed(0)
for vocabulary in (PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        among_others = torch.randn(5, vocabulary + 3).mul(5).to(dtype)
        logits = among_others[:, :vocabulary]
        logits[1] = -torch.inf
        logits[1, [7, vocabulary - 1]] = torch.tensor([2.0, 2.0], dtype=dtype)  # what top-k has left
        logits[2] += 60  # whose powers are none of float32 unless the largest is taken off
        tokens = torch.tensor([0, vocabulary - 1, 5, vocabulary - 2, vocabulary // 2])
        found, ranks = drawn_logprobs(logits, tokens)
        exact, counted = plain_logprobs(logits, tokens)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
        assert ranks.tolist() == counted.tolist()
        assert abs(found[1] - math.log(0.5)) < 1e-6 and ranks[1] == 2
assert is_right(torch.device("cpu"), torch.float32)
print("all the same")
"""
IN_FRONT = """
import torch
from hacrl.rollout.vllm import drawn_logprobs
from hacrl.rollout.vllm.own_logprobs import with_own_kernels

logits, tokens = torch.randn(3, 40), torch.tensor([4, 0, 39])


def theirs(*given, **named):
    return "theirs"


def result(*given):
    return given


def asked(way, *given, **named):
    said = way(*given, **named)
    if said == "theirs":
        return True
    ids, logprobs, ranks = said
    exact, counted = drawn_logprobs.plain_logprobs(logits, tokens)
    assert ids.tolist() == tokens[:, None].tolist() and ranks.tolist() == counted.tolist()
    torch.testing.assert_close(logprobs.double(), exact[:, None], rtol=1e-5, atol=1e-5)
    return False


way = with_own_kernels(theirs, result)
told = dict(logprob_token_ids_state=object(), expanded_idx_mapping=torch.arange(3), max_per_req_token_ids=0)
assert not asked(way, logits, 0, tokens) and not asked(way, logits, 0, tokens, None, **told)
assert asked(way, logits, 2, tokens) and asked(way, logits, num_logprobs=0, sampled_token_ids=tokens)
assert asked(way, logits, 0, tokens, [0, 1, 2, 3]) and asked(way, logits, 0, tokens, something_new=True)

right = drawn_logprobs.drawn_logprobs


def all_alike(logits, tokens):
    return torch.zeros(len(tokens)), torch.ones(len(tokens)).long()


def one_rank_off(*given):
    logprobs, ranks = right(*given)
    return logprobs, ranks + 1


def fails(*given):
    raise RuntimeError("no such instruction")


for wrong in (all_alike, one_rank_off, fails):  # as a compiler might get it wrong
    drawn_logprobs.drawn_logprobs = wrong
    assert asked(with_own_kernels(theirs, result), logits, 0, tokens)
print("all the same")
"""
BESIDE_VLLMS = """
import torch, triton, triton.language, vllm.triton_utils

# on a CPU vLLM does without Triton, unless it is told not to
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import logprob
from hacrl.rollout.vllm.own_logprobs import name_in, with_own_kernels

theirs = getattr(logprob, name_in(logprob))
ours = with_own_kernels(lambda *given, **named: "theirs", LogprobsTensors)
torch.manual_seed(0)
for dtype in (torch.float32, torch.float16):  # the interpreter cannot compare bfloat16
    logits = torch.randn(6, 20_001).mul(5).to(dtype)
    logits[3, 17:] = -torch.inf
    given = logits, 0, torch.tensor([0, 9000, 20_000, 16, 4, 12_345]), None
    named = dict(expanded_idx_mapping=torch.arange(6), max_per_req_token_ids=0)
    mine, other = ours(*given, **named), theirs(*given, **named)
    torch.testing.assert_close(mine.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
    for field in ("logprob_token_ids", "selected_token_ranks"):
        assert torch.equal(getattr(mine, field), getattr(other, field)), field
        assert getattr(mine, field).dtype == getattr(other, field).dtype, field
    assert mine[3:] == other[3:]
print("all the same")
"""


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
@pytest.mark.parametrize("check", [KERNELS, IN_FRONT], ids=["kernels", "in front of vLLM's"])
def test_they_are_those_of_the_logits(check: str) -> None:
    interpreted(check)


LOGITS, TOKENS = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "named", "are_ours"),
    [
        ((LOGITS, 0, TOKENS), {}, True),
        ((LOGITS, 0, TOKENS, None), {"max_per_req_token_ids": 0, "expanded_idx_mapping": TOKENS}, True),
        ((LOGITS, 1, TOKENS), {}, False),  # the likeliest one's, too
        ((LOGITS, 0, TOKENS, [0, 2]), {}, False),  # several of a response
        ((LOGITS, 0, TOKENS), {"max_per_req_token_ids": 1}, False),  # of given tokens
        ((LOGITS, 0, TOKENS), {"logits_mode": False}, True),
        ((LOGITS, 0, TOKENS), {"logits_mode": True}, False),  # logits themselves
        ((LOGITS, 0, TOKENS), {"something_new": TOKENS}, False),
        ((LOGITS.T.contiguous().T, 0, TOKENS), {}, False),  # a row's are not side by side
        ((LOGITS[0], 0, TOKENS), {}, False),
        ((LOGITS, 0, TOKENS[:1]), {}, False),
        ((LOGITS, 0, torch.zeros(4, dtype=torch.int64)[::2]), {}, False),
    ],
)
def test_what_the_kernels_take_over(given, named, are_ours) -> None:
    assert are_of_drawn_alone(given, named) is are_ours


class Platform:
    """A GPU, as vLLM describes it."""

    maker = "nvidia"

    def is_cuda(self) -> bool:
        return self.maker == "nvidia"


class TestWhereTheyAreUsed:
    @pytest.fixture(autouse=True)
    def sampler(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The part of a vLLM that draws tokens; what is put in front of it is its name."""
        names = ("v1", "v1.outputs", "v1.worker", "v1.worker.gpu", "v1.worker.gpu.sample", "platforms")
        for name in ("vllm", *(f"vllm.{name}" for name in names)):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sampler = ModuleType("sampler")
        sys.modules["vllm.v1.worker.gpu.sample"].sampler = sampler
        sys.modules["vllm.v1.outputs"].LogprobsTensors = "as tensors"
        sys.modules["vllm.platforms"].current_platform = Platform()
        monkeypatch.setattr(own_logprobs, "with_own_kernels", lambda *given: ("ours", *given))
        return sampler

    @pytest.mark.parametrize(
        ("version", "name"), [("0.25.1", "compute_topk_logprobs"), ("0.32.0", "compute_topk_scores")]
    )
    def test_in_front_of_vllms(self, sampler, version, name) -> None:
        setattr(sampler, name, "theirs")
        assert take_over_logprobs(version)
        assert getattr(sampler, name) == ("ours", "theirs", "as tensors")

    @pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
    def test_not_in_a_vllm_that_nobody_has_read(self, sampler, version) -> None:
        sampler.compute_topk_scores = "theirs"
        assert not take_over_logprobs(version)
        assert sampler.compute_topk_scores == "theirs"

    def test_not_on_another_kind_of_device(self, sampler, monkeypatch) -> None:
        sampler.compute_topk_scores = "theirs"
        monkeypatch.setattr(Platform, "maker", "amd")
        assert not take_over_logprobs("0.32.0")
        assert sampler.compute_topk_scores == "theirs"

    def test_not_where_vllm_draws_in_another_way(self, monkeypatch) -> None:
        assert not take_over_logprobs("0.32.0")
        monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample", None)
        assert not take_over_logprobs("0.32.0")


class TestVllmItself:
    pytestmark = IN_VLLM

    def test_its_own_kernels_say_the_same(self) -> None:
        interpreted(BESIDE_VLLMS)

    def test_its_function_is_called_as_expected(self) -> None:
        """The first arguments by place, others by names that are known, where it is replaced."""
        spec = find_spec("vllm.v1.worker.gpu.sample.sampler")
        assert spec is not None
        assert spec.origin is not None
        calls = [
            node
            for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in FUNCTIONS
        ]
        assert len(calls) == 1
        assert len(calls[0].args) == len(NEEDED) + 1
        named = {keyword.arg for keyword in calls[0].keywords}
        assert named - {"logits_mode"} == {*WITHOUT_EFFECT, "max_per_req_token_ids"}
