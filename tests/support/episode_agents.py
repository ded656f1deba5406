"""Random agents that call a tool now and then: whole parts of a call are single tokens of their tokenizers.

"whole" writes a call in one token, "parts" in two, so that the two retokenise each other's calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hacrl.models.agent import Agent

CONTEXT = 2048
STEADY = 4.0  # larger than what layers add, so that norms change it little
SPECIALS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
HEAD = '<tool_call>\n{"name": "guess", "arguments": {"number": '
TAIL = "}}\n</tool_call>"
WHOLE = tuple(f"{HEAD}{digit}{TAIL}" for digit in range(10))
HEADS = tuple(f"{HEAD}{digit}" for digit in range(10))


def call_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per character, and one for each of the longer pieces."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS, *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = [re.escape(piece) for piece in sorted(pieces, key=len, reverse=True)]
    pattern = Regex("|".join([*longest_first, r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def markov_llama(tokenizer: PreTrainedTokenizerFast, calls: Sequence[str], seed: int) -> LlamaForCausalLM:
    """A random Llama that mostly calls a tool and stops.

    The first three numbers of every state pass through all layers: a constant, whether the last token begins
    a call, and whether it ends one. The output layer leans on them; the other numbers are random.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    starts = tokenizer.convert_tokens_to_ids(list(calls))
    ends = [tokenizer.convert_tokens_to_ids(TAIL)] if TAIL in tokenizer.get_vocab() else starts
    embedded, out = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        embedded[:, :3] = torch.tensor([STEADY, 0.0, 0.0])
        embedded[ends, 2] = STEADY
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:3] = 0.0
            layer.mlp.down_proj.weight[:3] = 0.0
        model.model.norm.weight[:3] = 0.2  # about 1 then: leanings are logits
        out[:, :3] = torch.tensor([-2.0, 0.0, 0.0])
        out[starts, 0] = 4.0
        out[tokenizer.eos_token_id, :3] = torch.tensor([3.0, 0.0, 9.0])
        if ends != starts:
            embedded[starts, 1] = STEADY
            out[ends, 1] = 15.0
    return model


def whole_agent(name: str = "whole", seed: int = 0) -> Agent:
    """Writes a call in one token."""
    tokenizer = call_tokenizer(WHOLE)
    return Agent(name, markov_llama(tokenizer, WHOLE, seed), tokenizer)


def parts_agent(name: str = "parts", seed: int = 1) -> Agent:
    """Writes a call in two tokens."""
    tokenizer = call_tokenizer([*HEADS, TAIL])
    return Agent(name, markov_llama(tokenizer, HEADS, seed), tokenizer)


def save_agents(folder: Path) -> dict[str, Path]:
    """Save both agents; return name -> folder."""
    saved = {}
    for agent in (whole_agent(), parts_agent()):
        saved[agent.name] = folder / agent.name
        agent.save(saved[agent.name])
    return saved
