"""Tiny random agents: real transformers models with real tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel, Fuse, Metaspace
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl.models.agent import Agent

CHARACTERS = "0123456789+-*()=;#:"
SPECIALS = ["<pad>", "<eos>", "<unk>"]


def character_tokenizer(extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character; ``extra`` are longer pieces, e.g. all pairs of digits."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS, *extra])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = r"\d{1,2}|." if extra else "."
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """Digits in pairs from the left: 119 is "11", "9"."""
    return character_tokenizer([f"{i:02d}" for i in range(100)])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, as at the bottom of byte-level BPE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def sentencepiece_like_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their leading space as one piece, and a space put before the first word, as in Llama 2."""
    pieces = ["▁", "▁74", "74", ":", "▁:", "▁is", "is", "▁The", "The", *CHARACTERS.replace(":", "")]
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *pieces])}
    merges = [("7", "4"), ("▁", "74"), ("▁", ":"), ("i", "s"), ("▁", "is")]
    letters = ["T", "h", "e", "i", "s", "Th"]
    vocabulary |= {letter: len(vocabulary) + i for i, letter in enumerate(letters)}
    merges += [("T", "h"), ("Th", "e"), ("▁", "The")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Return the config entries that depend on the tokenizer."""
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }


def tiny_qwen(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, width: int = 16, layers: int = 2
) -> Qwen3ForCausalLM:
    """A random Qwen3 of a few thousand parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        **_tokens(tokenizer),
    )
    return Qwen3ForCausalLM(config).eval()


def tiny_llama(tokenizer: PreTrainedTokenizerFast, seed: int = 0, width: int = 16) -> LlamaForCausalLM:
    """A random Llama of a few thousand parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        **_tokens(tokenizer),
    )
    return LlamaForCausalLM(config).eval()


def tiny_gpt2(tokenizer: PreTrainedTokenizerFast, seed: int = 0, width: int = 16) -> GPT2LMHeadModel:
    """A random GPT-2 of a few thousand parameters. Its positions are absolute: a wrong one shows."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=width,
        n_layer=2,
        n_head=2,
        n_positions=64,
        **_tokens(tokenizer),
    )
    return GPT2LMHeadModel(config).eval()


def char_agent(name: str = "char", seed: int = 0, layers: int = 2) -> Agent:
    """A random Qwen3 that reads characters."""
    tokenizer = character_tokenizer()
    return Agent(name, tiny_qwen(tokenizer, seed, layers=layers), tokenizer)


def pair_agent(name: str = "pair", seed: int = 0) -> Agent:
    """A random Llama that reads digits in pairs."""
    tokenizer = pair_tokenizer()
    return Agent(name, tiny_llama(tokenizer, seed), tokenizer)


def absolute_agent(name: str = "absolute", seed: int = 0) -> Agent:
    """A random GPT-2 that reads characters."""
    tokenizer = character_tokenizer()
    return Agent(name, tiny_gpt2(tokenizer, seed), tokenizer)


def sharpened(agent: Agent, factor: float = 20.0) -> Agent:
    """The same agent with larger weights: fresh ones are so small that every next token is as likely."""
    with torch.no_grad():
        for parameter in agent.model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(factor)
    return agent


def with_logit_bias(agent: Agent, biases: dict[str, float]) -> Agent:
    """The same agent with some tokens' logits raised, e.g. ``{"<eos>": 3.0}`` so that responses end soon."""
    head = agent.model.lm_head
    biased = torch.nn.Linear(head.in_features, head.out_features, bias=True)
    with torch.no_grad():
        biased.weight.copy_(head.weight)
        biased.bias.zero_()
        for token, bias in biases.items():
            biased.bias[agent.tokenizer.convert_tokens_to_ids(token)] = bias
    agent.model.lm_head = biased
    return agent


def save_agents(folder: Path) -> dict[str, str]:
    """Two random agents of different architecture and tokenizer as Hugging Face folders: name -> folder."""
    saved = {}
    for agent in (char_agent(), pair_agent()):
        agent.save(folder / agent.name)
        saved[agent.name] = str(folder / agent.name)
    return saved
