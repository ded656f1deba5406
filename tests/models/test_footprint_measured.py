"""Memory estimates against measurements on a GPU, with and without compiled layers."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from hacrl.config.schema import LoraSettings
from hacrl.models.footprint import Decoding, Workload
from tests.models.footprints import LLAMA_1B, LLAMA_3B, QWEN3_1_7B, footprint_of


@pytest.mark.parametrize(
    ("shape", "options", "measured"),
    [
        # GiB on an H200 (torch 2.11), 64 responses to 8 prompts of 512 tokens, 256 new ones; learning from a
        # prompt of 512 and a response of 3584 tokens: rollout, learning
        (QWEN3_1_7B, {"gradient_checkpointing": True}, (5.41, 2.24)),
        (QWEN3_1_7B, {}, (5.38, 13.85)),
        (LLAMA_1B, {"gradient_checkpointing": True}, (1.61, 1.81)),
        (LLAMA_1B, {}, (1.61, 8.20)),
        (LLAMA_1B, {"lora": LoraSettings(), "gradient_checkpointing": True}, (1.61, 1.31)),
        (LLAMA_1B, {"lora": LoraSettings()}, (1.61, 10.69)),
        (LLAMA_1B, {"precision": "float32"}, (4.16, 51.39)),
        (QWEN3_1_7B, {"gradient_checkpointing": True, "filtered": True}, (5.75, 3.84)),
    ],
)
def test_estimates_against_measurements_on_a_gpu(shape, options, measured):
    options = {"precision": "bfloat16", **options}
    work = Workload(
        decodings=(Decoding(prompts=8, responses=64, prompt_tokens=512, new_tokens=256),),
        learnt_tokens=4096,
        longest_sample=4096,
        filtered=options.pop("filtered", False),
        compiled=False,
    )
    found = footprint_of(AutoConfig.for_model(**shape), work, "cuda", **options)
    for part, gib in zip((found.rollout, found.learning), measured, strict=True):
        assert 0.9 * gib < part / 2**30 < 1.35 * gib + 0.01
    assert found.update == 0  # measured: below 0.001; the fused optimizer makes no temporary tensors


@pytest.mark.parametrize(("checkpointing", "measured"), [(False, 26.28), (True, 3.83)])
def test_estimates_with_compiled_layers_against_measurements_on_a_gpu(checkpointing, measured):
    """GiB on an H200, 16 samples of 1,152 tokens."""
    work = Workload(decodings=(), learnt_tokens=18432, longest_sample=1152)
    options = {"precision": "bfloat16", "gradient_checkpointing": checkpointing}
    found = footprint_of(AutoConfig.for_model(**QWEN3_1_7B), work, "cuda", **options)
    assert found.learning / 2**30 == pytest.approx(measured, rel=0.07)


def test_activations_of_compiled_layers_and_when_layers_are_compiled():
    work = Workload(decodings=(), learnt_tokens=1000, longest_sample=500)
    config = AutoConfig.for_model(**LLAMA_3B)

    def kept(device: str, config=config, work: Workload = work, **options) -> int:
        """Numbers, by layer and token."""
        options = {"precision": "bfloat16", **options}
        width = 4 if options["precision"] == "float32" else 2
        return footprint_of(config, work, device, **options).activations / (1000 * 28 * width)

    # two residual sums of 3072, queries of 3072, keys and values of 1024, gate and up of 8192; rotated
    # queries and keys, and the attention's output
    compiled = 2 * 3072 + (3072 + 2 * 1024 + 2 * 8192) + (3072 + 1024 + 3072)
    assert compiled == 34_816
    assert kept("cuda") == compiled
    yes, no = (
        Workload(decodings=(), learnt_tokens=1000, longest_sample=500, compiled=c) for c in (True, False)
    )
    assert kept("cpu", work=yes) == compiled
    for plain in (
        kept("cpu"),
        kept("cuda", work=no),
        kept("cuda", precision="float32", attention="flash_attention_2"),
        kept("cuda", attention="flash_attention_2"),
    ):
        assert plain > 1.5 * compiled
    narrow = {"hidden_size": 72, "head_dim": 4, "intermediate_size": 64, "vocab_size": 99}
    small = AutoConfig.for_model(**(LLAMA_3B | narrow))
    assert kept("cuda", small) == kept("cpu", small)  # not compiled by default
