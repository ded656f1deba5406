"""Log-probabilities of a decoding step's drawn tokens: our kernels against vLLM's.

    python benchmarks/drawn_logprobs.py

Microseconds of a call, of the fastest of 5 replays of a graph with 20 of them, and the time in which a GPU
reads the logits once at the speed of a large copy. Those that fit into its cache are read faster than that.
"""

from __future__ import annotations

from functools import partial

import torch
from timing import copy_bandwidth, recorded

from hacrl.rollout.vllm.drawn_logprobs import drawn_logprobs
from hacrl.rollout.vllm.own_logprobs import name_in

GPU = torch.device("cuda")
CALLS = 20
CASES = ((256, 151_936), (64, 151_936), (16, 151_936), (1, 151_936), (256, 32_000), (1024, 151_936))


def main() -> None:
    """Every number of responses with its vocabulary."""
    from vllm.v1.worker.gpu.sample import logprob

    theirs = getattr(logprob, name_in(logprob))
    bandwidth = copy_bandwidth()
    print(f"a large copy: {bandwidth / 1e12:.2f} TB/s")
    print(f"{'responses':>9} {'logits':>8} {'vLLM':>8} {'ours':>7} {'ratio':>6} {'reading once':>13}")
    for rows, vocabulary in CASES:
        logits = torch.randn(rows, vocabulary, device=GPU)
        tokens = torch.randint(vocabulary, (rows,), device=GPU)
        calls = (partial(theirs, logits, 0, tokens), partial(drawn_logprobs, logits, tokens))
        before, after = (recorded([call] * CALLS) / CALLS * 1e6 for call in calls)
        floor = logits.nbytes / bandwidth * 1e6
        line = f"{before:8.1f} {after:7.1f} {before / after:6.2f} {floor:13.1f}"
        print(f"{rows:9} {vocabulary:8} {line}", flush=True)


if __name__ == "__main__":
    main()
