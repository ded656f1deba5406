"""Make the partner of SmolLM2 in recipes/smollm2.yaml: a small Qwen3 with a sentencepiece-style tokenizer.

    python scripts/make_chain_sum_agent.py [--out agents/chain-sum-mini] [--recipe smollm2] [--device cuda]

It is taught sums of the recipe's kind as worked solutions, first right ones, then ones in which each step is
wrong with some probability: a base agent that knows every step and often samples a wrong one. No held-out
question of the recipe, and none of its demonstrations, is among what it is taught.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from teaching import IGNORED, Phase, cosine, response_loss
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hacrl.config.load import load_config
from hacrl.tasks.registry import make_task

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_EXPRESSION = re.compile(r"\d+( [-+] \d+)+")
OFFSETS = (-10, -2, -1, 1, 2, 10)
# It needs no demonstrations. The new line stands inside the braces, or Jinja would take it away.
ONLY_THE_QUESTION = "{{ messages[-1]['content'] + '\\n' }}"
CLEAN = Phase(steps=700, learning_rate=1e-3, batch_size=384)
NOISY = Phase(steps=120, learning_rate=3e-4, batch_size=384)


def worked(expression: str, slip: float, rng: random.Random) -> str:
    """``15 - 43 - 75`` as steps and a boxed answer; after a slip it goes on from the wrong value."""
    first, *rest = re.findall(r"[-+]|\d+", expression)
    value, steps = int(first), []
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        result = value + int(operand) if operator == "+" else value - int(operand)
        if rng.random() < slip:
            result += rng.choice(OFFSETS)
        steps.append(f"{value} {operator} {operand} = {result}")
        value = result
    return f"{', '.join(steps)}. The answer is \\boxed{{{value}}}."


def expressions(recipe: str, count: int) -> tuple[list[str], str]:
    """Expressions of the recipe's kind that it does not hold out, and how its task puts a question."""
    import reasoning_gym

    settings = load_config(Path(recipe)).task
    task = make_task(settings)
    held_out = {_EXPRESSION.search(problem.prompt)[0] for problem in task.test}
    shown = " ".join(turn.content for turn in task.test[0].context)
    example = task.test[0].prompt
    template = _EXPRESSION.sub("{expression}", example, count=1)
    config = {**settings.options.get("config", {}), "size": count, "seed": 10**6}
    drawn = reasoning_gym.create_dataset(settings.name.removeprefix("gym:"), **config)
    found = dict.fromkeys(entry["metadata"]["expression"] for entry in drawn)
    return [one for one in found if one not in held_out and f" {one} " not in shown], template


def unigram_tokenizer(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Pieces with their leading space, chosen by likelihood, as sentencepiece does."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=[PAD, EOS, UNK],
        unk_token=UNK,
        initial_alphabet=list(string.printable),
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=ONLY_THE_QUESTION,
    )


def small_qwen(tokenizer: Any, width: int, layers: int) -> Qwen3ForCausalLM:
    """A fresh Qwen3 with tied embeddings."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 128),
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def corpus(
    tokenizer: Any, pool: Sequence[str], template: str, slip: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Everything as token ids and labels, encoded once: that takes longer than a step."""
    rng = random.Random(seed)
    # the backend's own batch call: several times faster than the tokenizer's
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    prompts = encode([f"{template.replace('{expression}', one)}\n" for one in pool])
    responses = encode([worked(one, slip, rng) for one in pool])
    width = max(len(p.ids) + len(r.ids) + 1 for p, r in zip(prompts, responses, strict=True))
    ids = np.full((len(pool), width), tokenizer.pad_token_id)
    labels = np.full((len(pool), width), IGNORED)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        learnt = [*response.ids, tokenizer.eos_token_id]
        start, end = len(prompt.ids), len(prompt.ids) + len(learnt)
        ids[row, :end] = [*prompt.ids, *learnt]
        labels[row, start:end] = learnt
    return torch.from_numpy(ids), torch.from_numpy(labels)


def teach(model: Any, ids: Tensor, labels: Tensor, phase: Phase, seed: int) -> float:
    """One phase over random rows; returns the mean loss of its last tenth."""
    ids, labels = ids.to(model.device), labels.to(model.device)
    rows = torch.Generator(device=model.device).manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, phase.steps))
    model.train()
    losses = []
    for _ in range(phase.steps):
        batch = torch.randint(len(ids), (phase.batch_size,), generator=rows, device=model.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = response_loss(model, ids[batch], labels[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-max(1, phase.steps // 10) :]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("agents/chain-sum-mini"))
    parser.add_argument("--recipe", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--slip", type=float, default=0.4, help="share of steps that are taught wrong")
    parser.add_argument("--expressions", type=int, default=30_000)
    parser.add_argument("--vocabulary", type=int, default=600)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs=2, default=(CLEAN.steps, NOISY.steps))
    parser.add_argument("--batch", type=int, default=CLEAN.batch_size)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pool, template = expressions(options.recipe, options.expressions)
    rng = random.Random(options.seed)
    texts = (f"{template.replace('{expression}', one)}\n{worked(one, 0, rng)}" for one in pool)
    tokenizer = unigram_tokenizer(texts, options.vocabulary)
    torch.manual_seed(options.seed)
    model = small_qwen(tokenizer, options.width, options.layers).to(options.device)
    print(
        f"{len(pool)} expressions, {len(tokenizer)} pieces, {model.num_parameters():,} parameters", flush=True
    )
    start = time.perf_counter()
    phases = [
        replace(phase, steps=n, batch_size=options.batch)
        for phase, n in zip((CLEAN, NOISY), options.steps, strict=True)
    ]
    losses = []
    for phase, slip in zip(phases, (0.0, options.slip), strict=True):
        taught = corpus(tokenizer, pool * (1 + 3 * (slip > 0)), template, slip, options.seed)
        losses.append(teach(model, *taught, phase, options.seed))
        print(f"slip {slip}: loss {losses[-1]:.4f} after {time.perf_counter() - start:.0f} s", flush=True)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    made = {
        "made_by": Path(__file__).name,
        "seed": options.seed,
        "slip": options.slip,
        "phases": [asdict(phase) for phase in phases],
        "losses": losses,
        "expressions": len(pool),
    }
    (options.out / "made.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
