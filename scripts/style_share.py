"""How often an agent of a study answers at once, without a worked step, and how right it is in either style.

    python scripts/style_share.py STUDY [--agent worked] [--problems 400]

STUDY is the output folder of ``hacrl compare recipes/style.yaml``. One response per held-out problem, at
temperature 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.tasks.arithmetic import ArithmeticTask

SAMPLING: dict[str, Any] = {
    "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 32
}  # fmt: skip


@dataclass(frozen=True)
class Styles:
    """Of one agent; an accuracy is NaN where no response has that style."""

    direct_share: float
    direct_accuracy: float
    worked_accuracy: float


@torch.inference_mode()
def responses(folder: Path, prompts: Sequence[str]) -> list[str]:
    """One sampled response to each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(list(prompts), padding=True, return_tensors="pt")
    torch.manual_seed(0)
    tokens = model.generate(**batch, **SAMPLING)
    return list(tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def measure(folder: Path, problems: int) -> Styles:
    """Split one agent's responses by style; a response without ``=`` shows no step."""
    task = ArithmeticTask()
    chosen = task.test[:problems]
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for problem, text in zip(chosen, responses(folder, [p.prompt for p in chosen]), strict=True):
        rewards["=" not in text].append(task.judge(problem, text).reward)
    return Styles(len(rewards[True]) / len(chosen), _mean(rewards[True]), _mean(rewards[False]))


def _mean(values: Sequence[float]) -> float:
    """Over the values that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--agent", default="worked")
    parser.add_argument("--problems", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print("| variant | direct share (each seed) | accuracy when direct | when worked |\n|---|---|---|---|")
    for variant in sorted(path for path in args.study.iterdir() if path.is_dir()):
        runs = [measure(run / "agents" / args.agent, args.problems) for run in sorted(variant.glob("seed-*"))]
        shares = [run.direct_share for run in runs]
        each = ", ".join(f"{share:.3f}" for share in shares)
        print(
            f"| {variant.name} | {_mean(shares):.3f} ({each}) "
            f"| {_mean([run.direct_accuracy for run in runs]):.2f} "
            f"| {_mean([run.worked_accuracy for run in runs]):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
