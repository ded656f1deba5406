"""Small stand-ins for the paper's models, with their architectures and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

RIGHT, WRONG = r"\boxed{7}", r"\boxed{3}"  # one token each, so that random models sometimes generate them
TEXT = [
    "What is 3 + 4? Let's think step by step and output the final answer within \\boxed{}.",
    "Find the remainder when 107 is divided by 10. The answer is \\boxed{7}.",
    "How many of the numbers 1, 2, ..., 7 are there? We count: one, two, three, four, five, six, seven.",
] * 3
QWEN_TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA_TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""


def _byte_level_bpe(vocabulary: int, specials: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in (RIGHT, WRONG)])
    return backend


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, ChatML, thinking that can be switched off."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(300, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with other merges, a begin-of-text token before plain text, headers before turns."""
    specials = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    backend = _byte_level_bpe(270, specials)
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos]),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = LLAMA_TEMPLATE
    return tokenizer


TOKENIZERS = {"qwen3": qwen_tokenizer, "llama": llama_tokenizer}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 128,
}


def small_config(model_type: str, tokenizer: PreTrainedTokenizerFast, width: int) -> PretrainedConfig:
    """Tied embeddings, queries wider than the model, keys shared by heads: as in the real ones."""
    rope = {"rope_parameters": LLAMA_ROPE} if model_type == "llama" else {}
    return AutoConfig.for_model(
        model_type,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **rope,
    )


def save_small_model(folder: Path, model_type: str, seed: int, width: int = 32) -> None:
    """Save random bfloat16 weights that prefer a right or a wrong answer and stopping.

    Every embedding gets the same first number, so that it stands out in every state; in the answers' and the
    stop token's it is larger, and as embeddings are tied that makes them likely. In those of single
    bytes of longer characters it is negative: other tokenizers cannot encode broken characters.
    """
    tokenizer = TOKENIZERS[model_type]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_config(model_type, tokenizer, width))
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        for token in range(len(tokenizer)):
            embeddings[token, 0] = 0.5 if tokenizer.decode([token]).isascii() else -0.5
        for token, more in ((RIGHT, 0.45), (WRONG, 0.4), (tokenizer.eos_token, 0.4)):
            embeddings[tokenizer.convert_tokens_to_ids(token), 0] += more
        model.model.norm.weight[0] = 10 / width**0.5
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_shape_only(folder: Path, shape: dict[str, object]) -> None:
    """Save a real config.json and a small tokenizer, without weights."""
    tokenizer = TOKENIZERS[str(shape["model_type"])]()
    AutoConfig.for_model(**shape, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_problems(folder: Path) -> tuple[Path, Path]:
    """Write problems in the format of MATH, all with the answer 7: 24 for training, 6 for testing."""
    rows = [{"problem": f"What is ${n + 7} - {n}$?", "answer": "7", "level": "Level 1"} for n in range(30)]
    files = folder / "train.jsonl", folder / "test.jsonl"
    for file, part in zip(files, (rows[:24], rows[24:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    return files
