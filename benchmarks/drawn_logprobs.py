"""Log-probabilities of a decoding step's drawn tokens: our kernels against vLLM's.

    python benchmarks/drawn_logprobs.py

Microseconds of a call, of the fastest of 5 replays of a graph with 20 of them, and the time in which a GPU
reads the logits once at the speed of a large copy. Those that fit into its cache are read faster than that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import best_of
from torch import Tensor

from hacrl.rollout.vllm.drawn_logprobs import drawn_logprobs
from hacrl.rollout.vllm.own_logprobs import FUNCTIONS

GPU = torch.device("cuda")
CALLS = 20
CASES = ((256, 151_936), (64, 151_936), (16, 151_936), (1, 151_936), (256, 32_000), (1024, 151_936))


def main() -> None:
    """Every number of responses with its vocabulary."""
    from vllm.v1.worker.gpu.sample import logprob

    theirs = next(getattr(logprob, name) for name in FUNCTIONS if hasattr(logprob, name))
    source = torch.randn(2**28, device=GPU)
    copied = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / best_of(5, lambda: copied.copy_(source))
    print(f"a large copy: {bandwidth / 1e12:.2f} TB/s")
    print(f"{'responses':>9} {'logits':>8} {'vLLM':>8} {'ours':>7} {'ratio':>6} {'reading once':>13}")
    for rows, vocabulary in CASES:
        logits = torch.randn(rows, vocabulary, device=GPU)
        tokens = torch.randint(vocabulary, (rows,), device=GPU)
        before = microseconds(theirs, logits, 0, tokens)
        after = microseconds(drawn_logprobs, logits, tokens)
        floor = logits.nbytes / bandwidth * 1e6
        line = f"{before:8.1f} {after:7.1f} {before / after:6.2f} {floor:13.1f}"
        print(f"{rows:9} {vocabulary:8} {line}", flush=True)


def microseconds(function: Callable[..., object], *given: Tensor | int) -> float:
    """Of a call in a recorded graph."""
    function(*given)  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function(*given)
    return best_of(5, graph.replay) / CALLS * 1e6


if __name__ == "__main__":
    main()
