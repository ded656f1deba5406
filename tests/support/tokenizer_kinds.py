"""One small tokenizer of every common kind, trained on a page of text, and agents with them."""

from __future__ import annotations

import json
import string
from functools import cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hacrl.models.agent import Agent

ASCII = string.ascii_letters + string.digits + string.punctuation + " \n\t\r"
MARK = "\u2581"  # "▁", which stands for a space in sentencepiece's pieces
TEXT = [
    "First we add 12 and 30 to get 42. Then we divide by 2, so the answer is \\boxed{21}.",
    "The slope is \\frac{3}{4}, hence $y = \\frac{3}{4} x + 5$ and $x^2 - 4 = (x - 2)(x + 2)$.",
    "def square(x):\n    return x ** 2\n\nprint(square(7))  # 49",
    "Let n be even; then n = 2k for some integer k. Therefore n^2 = 4k^2, which is divisible by 4.",
    "We're told that it's 10% of 250; don't round: 0.1 * 250 = 25.0 [units] \"as given\" <ok> {x|y} ~ @ & _",
    "Step 1: simplify. Step 2: substitute. Step 3: the result is 1234567890.",
    " ".join(ASCII),
] * 4


def _fast(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def byte_bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with chat tokens, as in GPT-2, Qwen and Llama 3."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    tokenizer = _fast(backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return tokenizer


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """Sentencepiece's unigram, as in T5: text is normalised, spaces are merged, the unknown is <unk>."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>", "<s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=list(ASCII),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return _fast(backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Sentencepiece's BPE that spells unknown characters in bytes, as in Llama 2, Mistral and Gemma."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)
    trained.train_from_iterator(TEXT, trainer)
    vocabulary = trained.get_vocab()
    merges = _merges_of(trained)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """One token per ASCII character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *ASCII])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return _fast(backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def agent_with(tokenizer: PreTrainedTokenizerFast, name: str, context_length: int = 4096) -> Agent:
    """Return an agent with this tokenizer and a minimal random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context_length,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return Agent(name, LlamaForCausalLM(config).eval(), tokenizer)


@cache
def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """Load SmolLM2's tokenizer from the installed package (a few seconds, once)."""
    from hacrl.models.smollm2 import load_tokenizer

    return load_tokenizer()
