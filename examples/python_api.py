"""Two different language models teach each other, with a reward function of your own. A CPU will do.

    python examples/python_api.py            # the folder runs/python_api, in less than a minute
    python examples/python_api.py 40         # more steps

The agents come with hacrl; any Hugging Face id, folder, or (model, tokenizer) pair works the same.
"""

from __future__ import annotations

import random
import sys

from hacrl import HACRLConfig, HACRLTrainer


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """One reward per completion: is the number behind "#" right? ``answer`` is a column of the data."""
    return [float(text.endswith(f"#{gold}")) for text, gold in zip(completions, answer, strict=True)]


sums = [(a, b, c) for a in range(10, 40) for b in range(2, 20) for c in (2, 3) if (a + b) * c < 120]
random.Random(0).shuffle(sums)
rows = [{"prompt": f"({a}+{b})*{c}:", "answer": str((a + b) * c)} for a, b, c in sums]

trainer = HACRLTrainer(
    agents=["bundled:qwen-small-a", "bundled:llama-pairs"],
    reward_funcs=correct,
    train_dataset=rows[50:],
    eval_dataset=rows[:50],
    args=HACRLConfig(
        output="runs/python_api",
        overwrite=True,  # so that the example can be run again
        steps=int(sys.argv[1]) if len(sys.argv) > 1 else 10,
        threads=1,
        method={"name": "hacpo", "clip_low": 0.05, "clip_high": 0.05},
        rollout={"prompts_per_step": 8, "max_new_tokens": 32},
        learning={"lr": 2e-4, "betas": [0.9, 0.95]},
        trackers="tensorboard" if "tensorboard" in sys.argv else (),
    ),
)
result = trainer.train()

for name, agent in trainer.agents.items():
    before, after = result.accuracies[0][name], result.accuracies[max(result.accuracies)][name]
    print(f"{name} ({type(agent.model).__name__}): accuracy {before.mean:.3f} -> {after.mean:.3f}")
print(f"saved in {result.folder / 'agents'}")
