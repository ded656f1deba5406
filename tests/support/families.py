"""Text codecs of model families: small tokenizers with the published chat templates and control tokens.

The templates come with TRL, but for SmolLM2's and TinyLlama's. TRL keeps them for the same purpose: to
recognise models by them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from hacrl.models.tokenizing import TextCodec
from hacrl.types import Problem, Tool
from tests.support.tokenizer_kinds import byte_bpe_tokenizer, byte_fallback_tokenizer

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, ' }}"
    "{{ 'trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINYLLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Like Mistral's: a result must follow a call, and names it by an identifier of nine characters.
RESULTS_AFTER_CALLS_TEMPLATE = (
    "{% if tools %}{{ '<s>[TOOLS]' + (tools | tojson) + '\n' }}{% else %}{{ '<s>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result must follow a call') }}{% endif %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters, please') }}{% endif %}"
    "{{ '[RESULT]' + m.content + '\n' }}"
    "{% else %}{{ '[' + m.role + ']' + m.content }}{% for call in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{ '</s>' if m.role == 'assistant' else '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
# family -> TRL's template or the template itself, control tokens, the tokenizer's eos
FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "qwen2.5": ("qwen2_5", CHATML, "<|im_end|>"),
    "qwen3": ("qwen3", CHATML, "<|im_end|>"),
    "qwen3.5": ("qwen3_5_think", CHATML, "<|im_end|>"),
    "llama3.2": ("llama3_2", LLAMA, "<|eot_id|>"),
    "gemma3": ("gemma3", GEMMA, "<end_of_turn>"),
    "smollm2": (SMOLLM2_TEMPLATE, CHATML, "<|im_end|>"),
    "tinyllama": (TINYLLAMA_TEMPLATE, (), "</s>"),
    "after calls": (RESULTS_AFTER_CALLS_TEMPLATE, ("<s>", "</s>"), "</s>"),
    "plain": ("", CHATML, "<|im_end|>"),
}

ADD = Tool(
    "add",
    "Adds two numbers.",
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, '
    '"required": ["a", "b"]}',
)
QUESTION = Problem("sum", "What is 2 + 3 + 4?", "9", tools=(ADD,))


def trl_template(name: str) -> str:
    """Return a published chat template."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def family_tokenizer(template: str, special: tuple[str, ...], eos: str) -> PreTrainedTokenizerFast:
    """Return byte-level BPE, or sentencepiece's BPE without ``special``, with these control tokens."""
    if not special:
        tokenizer = byte_fallback_tokenizer()
        # one token a byte; the training text has a newline only inside of words
        backend = tokenizer.backend_tokenizer
    else:
        backend = Tokenizer.from_str(byte_bpe_tokenizer().backend_tokenizer.to_str())
        backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    bos = next((token for token in ("<|begin_of_text|>", "<bos>", "<s>") if backend.token_to_id(token)), None)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    made.chat_template = template or None
    return made


@cache
def family(name: str) -> TextCodec:
    """Return the codec of a family, without weights."""
    template, special, eos = FAMILIES[name]
    if template and "{" not in template:
        template = trl_template(template)
    return codec(name, family_tokenizer(template, special, eos))


def codec(name: str, tokenizer: Any, **options: Any) -> TextCodec:
    """Return a codec whose generation config ends responses with the tokenizer's eos."""
    return TextCodec(name, tokenizer, SimpleNamespace(eos_token_id=tokenizer.eos_token_id), None, **options)
