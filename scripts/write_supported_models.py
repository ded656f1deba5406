"""Train a tiny model of each architecture for two steps, and write docs/supported_models.md.

python scripts/write_supported_models.py
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the tiny models are the tests'
from tests.support.architectures import ARCHITECTURES, Trained, causal_class_name, two_steps  # noqa: E402

PAGE = ROOT / "docs" / "supported_models.md"
PREFACE = """\
# Supported models

<!-- written by scripts/write_supported_models.py; do not edit -->

An agent is a decoder-only causal language model that `AutoModelForCausalLM` of transformers loads. hacrl
decides from the model's config how it trains, before any weights load. `hacrl train RECIPE --dry-run` shows
the decision in the row `sequences`.

- **packed**: learning lays sequences end to end in one row, and computes a prompt once for all responses to
  it. Generation computes it once, too; on a GPU with continuous batching.
- **plain**: learning computes one row per sequence. Models with attention only generate in rows that are
  padded in front. Models with recurrent or convolution layers generate with `generate` of transformers:
  prompts of equal length side by side, without padding, each response with its own prompt.
- **refused**: an error names the key, the reason and what to do, before weights load.

What holds for all of them:

- Packed and plain compute the same numbers. Tests compare log-probabilities and gradients with one forward
  pass per sequence, and the log-probabilities of the sampler with those of the learner.
- A trial of each loaded model has the last word. Where a cache changes its numbers, hacrl generates without
  one, which is slow, and says so. A model whose log-probabilities depend on later tokens is refused.
- With `engine: vllm` vLLM generates. It has a list of its own, and the table is then about learning.
- Recurrent layers in plain torch are slow and need much memory. `flash-linear-attention`, or `mamba-ssm` and
  `causal-conv1d`, speed some of them up on a GPU. Memory estimates are for layers without these kernels.
- Of a model of images and text, the text part is trained if transformers has a causal language model for it.
  An agent of Qwen3.5 is saved without its image encoder, an agent of Gemma 3 with it.
- A model with Python code of its own needs `trust_remote_code: true`. A trial decides between packed and
  plain.

## Architectures

"""


def supported_models_page(results: Mapping[str, Trained]) -> str:
    """Return the page as Markdown."""
    counts = {path: sum(found.path == path for found in results.values()) for path in ("packed", "plain")}
    lines = [
        f"A tiny model with random weights of each of these {len(results)} architectures was trained for two",
        "HACPO steps beside a Qwen3 on a CPU, with transformers "
        f"{transformers.__version__}: {counts['packed']} packed, {counts['plain']} plain.",
        "`python scripts/write_supported_models.py` repeats that in four minutes. Most were not tried with",
        "real weights.",
        "",
        "| `model_type` | class | result | generation | why |",
        "|---|---|---|---|---|",
        *_rows(results),
    ]
    return PREFACE + "\n".join(lines) + "\n"


def _rows(results: Mapping[str, Trained]) -> Iterator[str]:
    for name, found in sorted(results.items()):
        cells = (f"`{name}`", causal_class_name(name), found.path, found.generation, found.reason)
        yield "|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""])


def train_all() -> dict[str, Trained]:
    results = {}
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = found = two_steps(name, Path(folder))
        print(f"{name}: {found.path}, gap {found.largest_gap:.1e}, moved {found.moved:.1e}", flush=True)
        assert found.path == "refused" or (found.largest_gap < 1e-4 and found.moved > 1e-4), name
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    PAGE.write_text(supported_models_page(train_all()), encoding="utf-8")
