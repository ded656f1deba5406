"""Make the tiny base agents that the package bundles: tokenizer, model, teaching, Hugging Face folder.

    python scripts/make_bundled_agents.py [--out DIR] [--device cpu|cuda] [--agents a,b] [--seed 0]

Four agents that differ in state, size, architecture and tokenizer, and that slip in different places; and two
that differ in style: one answers at once, without the steps, one needs them but tries without now and then.
"""

from __future__ import annotations

import argparse
import json
import string
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from teaching import (
    OFFSETS,
    STYLES,
    Noise,
    Phase,
    Writer,
    accuracy,
    mixed_writer,
    noisy_writer,
    teach,
    write_direct,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from hacrl.tasks.arithmetic import ArithmeticTask

BUNDLED = Path(__file__).resolve().parents[1] / "src" / "hacrl" / "models" / "bundled"
PAD, EOS, UNK, BOS = "<pad>", "<eos>", "<unk>", "<bos>"
SYMBOLS = "+-*()=;:#"
MAX_LENGTH = 128


def character_tokenizer(symbols: str = SYMBOLS) -> PreTrainedTokenizerFast:
    """One token per character, no BOS."""
    return _tokenizer([PAD, EOS, UNK], list(string.digits + symbols), pattern=r"[\s\S]")


def pair_tokenizer(symbols: str = SYMBOLS) -> PreTrainedTokenizerFast:
    """Digits in pairs from left to right (``119`` is ``11 9``), other characters alone; BOS first."""
    pairs = [a + b for a in string.digits for b in string.digits]
    return _tokenizer([PAD, EOS, UNK, BOS], [*string.digits, *symbols, *pairs], pattern=r"[0-9]{1,2}|[\s\S]")


def _tokenizer(special: list[str], pieces: list[str], *, pattern: str) -> PreTrainedTokenizerFast:
    vocabulary = {piece: i for i, piece in enumerate(special + pieces)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()  # joins the pieces without spaces
    if BOS in vocabulary:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        bos_token=BOS if BOS in vocabulary else None,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


@dataclass(frozen=True)
class AgentSpec:
    """How one agent is built and taught."""

    config: type[Qwen3Config] | type[LlamaConfig]
    shape: dict[str, int]
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    noise: Noise | None  # none: right solutions are all it is taught
    seed: int  # added to the script's seed, so that an agent does not depend on which others are made
    clean: Phase
    noisy: Phase | None
    style: str = "worked"  # of the clean phase
    direct_share: float = 0.0  # of the noisy phase's solutions; the others are worked


def _shape(hidden: int, heads: int, mlp: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,  # the smallest that common attention kernels support
    }


SMALL = _shape(hidden=64, heads=2, mlp=176)
LARGE = _shape(hidden=112, heads=4, mlp=280)
PAIRS = _shape(hidden=96, heads=3, mlp=256)
CLEAN = Phase(steps=1600, learning_rate=4e-3, batch_size=64)
SHORT = Phase(steps=1200, learning_rate=4e-3, batch_size=64)  # the larger net needs fewer, and they cost more
LONG = Phase(
    steps=2400, learning_rate=4e-3, batch_size=64
)  # pairs: a hundred more tokens, each seen less often
DIRECT = Phase(steps=3000, learning_rate=4e-3, batch_size=64)  # two operations at once are harder to learn
NOISY = Phase(steps=400, learning_rate=1e-3, batch_size=128)
AGENTS = {
    "qwen-small-a": AgentSpec(Qwen3Config, SMALL, character_tokenizer, Noise(0.15, 0.72), 1, CLEAN, NOISY),
    "qwen-small-b": AgentSpec(Qwen3Config, SMALL, character_tokenizer, Noise(0.57, 0.22), 2, CLEAN, NOISY),
    "qwen-large": AgentSpec(Qwen3Config, LARGE, character_tokenizer, Noise(0.61, 0.25), 3, SHORT, NOISY),
    "llama-pairs": AgentSpec(LlamaConfig, PAIRS, pair_tokenizer, Noise(0.49, 0.16), 4, LONG, NOISY),
    "qwen-direct": AgentSpec(Qwen3Config, SMALL, character_tokenizer, None, 5, DIRECT, None, "direct"),
    "qwen-worked": AgentSpec(
        Qwen3Config, SMALL, character_tokenizer, Noise(0.57, 0.22), 6, CLEAN, NOISY, direct_share=0.05
    ),
}


def build(spec: AgentSpec, tokenizer: PreTrainedTokenizerFast) -> Any:
    """An untaught model of the agent's shape."""
    config = spec.config(
        **spec.shape,
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.06,  # near 1 / sqrt(hidden size): the usual 0.02 learns several times slower
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _base_writer(noise: Noise, direct_share: float) -> Writer:
    """The writer of the noisy phase."""
    worked = noisy_writer(noise)
    return mixed_writer(worked, write_direct, direct_share) if direct_share else worked


def make(name: str, out: Path, *, device: str, seed: int) -> dict[str, Any]:
    """Teach one agent, save it, and measure what was saved."""
    began = time.perf_counter()
    spec = AGENTS[name]
    seed += spec.seed
    torch.manual_seed(seed)
    tokenizer = spec.tokenizer()
    model = build(spec, tokenizer).to(device)
    test = ArithmeticTask().test
    teach(model, tokenizer, STYLES[spec.style], spec.clean, seed=seed)
    clean = accuracy(model, tokenizer, test, samples=1)
    if spec.noise and spec.noisy:
        teach(model, tokenizer, _base_writer(spec.noise, spec.direct_share), spec.noisy, seed=seed + 100)
    taught = time.perf_counter() - began
    folder = out / name
    model.half().save_pretrained(folder)
    spec.tokenizer().save_pretrained(folder)  # a fresh one: measuring left its padding in the other

    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    reread = AutoTokenizer.from_pretrained(folder)
    record = {
        "agent": name,
        "parameters": saved.num_parameters(),
        "clean_accuracy": round(clean, 4),
        "sampled_accuracy": round(accuracy(saved, reread, test, samples=2), 4),
        "greedy_accuracy": round(accuracy(saved, reread, test, samples=0), 4),
        "test_problems": len(test),
        "seconds": round(taught, 1),
        **_recipe(spec),
        "seed": seed,
    }
    (folder / "TEACHING.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def _recipe(spec: AgentSpec) -> dict[str, Any]:
    """What the agent was taught, as its folder tells it."""
    phases = {"clean": asdict(spec.clean)}
    if not (spec.noise and spec.noisy):
        return {"style": spec.style, "phases": phases}
    noise = {"+-": spec.noise.term, "*": spec.noise.factor, "offsets": OFFSETS}
    habit = {"direct_share": spec.direct_share} if spec.direct_share else {}
    return {"noise": noise, **habit, "phases": {**phases, "noisy": asdict(spec.noisy)}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=BUNDLED)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--agents", default=",".join(AGENTS), help="comma-separated names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    names = args.agents.split(",")
    if unknown := set(names) - set(AGENTS):
        parser.error(f"--agents: unknown {sorted(unknown)}; there are {sorted(AGENTS)}")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    for name in names:
        record = make(name, args.out, device=args.device, seed=args.seed)
        print(*(f"{key}={record[key]}" for key in list(record)[:7]), flush=True)


if __name__ == "__main__":
    main()
