"""Measure how fast optimizers are offloaded and reloaded, and how much of it computation hides; one run.

    python benchmarks/offload.py --shapes qwen3-1.7b qwen3-4b

Two agents of a real model's shape, bfloat16 with float32 masters and moments: first alone, then one leaves
while the other is reloaded, as between two learners, then the same beside matrix products.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES
from timing import timed
from torch import Tensor

from hacrl.training.offload import CudaTransfers
from hacrl.training.optimizer import MasterWeightAdamW

GIB = 2**30
REPEATS = 3


@dataclass(frozen=True)
class Figures:
    """Of one pair of agents."""

    gib: tuple[float, float]  # masters and moments of each
    held_gib: tuple[float, float]  # of the GPU, all at home and all away
    first_seconds: float  # to leave for the first time: the machine's memory is pinned
    out_gib_per_second: float
    in_gib_per_second: float
    duplex_gib_per_second: float  # one is offloaded while the other is reloaded
    compute_seconds: float  # matrix products alone ...
    transfer_seconds: float  # ... the exchange of the two alone ...
    both_seconds: float  # ... and at the same time

    @property
    def hidden(self) -> float:
        """Share of the transfers that costs no time."""
        return (self.compute_seconds + self.transfer_seconds - self.both_seconds) / self.transfer_seconds


def parameters(shape: str, device: torch.device) -> list[Tensor]:
    """Random bfloat16 weights of a model's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    numbers: dict[str, Any] = dict(SHAPES[shape])
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[numbers.pop("kind")]
    with torch.device("meta"):
        model = model_class(config_class(**numbers)).to(torch.bfloat16)
    return [
        torch.nn.Parameter(torch.randn(value.shape, dtype=torch.bfloat16, device=device))
        for value in model.parameters()
    ]


def trained(shape: str, device: torch.device) -> MasterWeightAdamW:
    """An optimizer that has made an update, so that it has moments."""
    optimizer = MasterWeightAdamW(parameters(shape, device), 1e-6, (0.9, 0.999), 0.0)
    optimizer.zero_gradients()
    optimizer.step()
    return optimizer


def best(work: Callable[[], object], undo: Callable[[], object]) -> float:
    """The shortest of a few times."""
    times = []
    for _ in range(REPEATS):
        times.append(timed(work))
        timed(undo)
    return min(times)


def measure(shapes: tuple[str, str], device: torch.device) -> Figures:
    """Both agents on one GPU."""
    transfers = CudaTransfers(device)
    first, second = (trained(shape, device) for shape in shapes)
    sizes = [
        sum(value.nbytes for key, value in one.tensors().items() if not key.endswith("step"))
        for one in (first, second)
    ]
    pinned = timed(lambda: [one.offload(transfers) for one in (first, second)])  # gradients go for good
    first.reload()
    second.reload()
    torch.cuda.synchronize()
    home = torch.cuda.memory_allocated(device)
    out = best(lambda: first.offload(transfers), first.reload)
    first.offload(transfers)
    back = best(first.reload, lambda: first.offload(transfers))
    second.offload(transfers)
    torch.cuda.synchronize()
    away = torch.cuda.memory_allocated(device)
    second.reload()  # from here on: one of them is there

    def exchange() -> None:
        second.offload(transfers)
        first.reload()

    def exchange_back() -> None:
        first.offload(transfers)
        second.reload()

    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    duplex = best(exchange, exchange_back)
    products = max(1, round(2 * duplex / (timed(lambda: [matrix @ matrix for _ in range(20)]) / 20)))

    def compute() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def both() -> None:
        exchange()
        compute()

    computing = best(compute, lambda: None)
    together = best(both, exchange_back)
    return Figures(
        gib=(sizes[0] / GIB, sizes[1] / GIB),
        held_gib=(home / GIB, away / GIB),
        first_seconds=pinned,
        out_gib_per_second=sizes[0] / GIB / out,
        in_gib_per_second=sizes[0] / GIB / back,
        duplex_gib_per_second=sum(sizes) / GIB / duplex,
        compute_seconds=computing,
        transfer_seconds=duplex,
        both_seconds=together,
    )


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs=2, choices=SHAPES, default=["qwen3-1.7b", "qwen3-4b"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(tuple(options.shapes), torch.device("cuda", 0))
    print(f"masters and moments: {found.gib[0]:.1f} and {found.gib[1]:.1f} GiB")
    print(f"of the GPU: {found.held_gib[0]:.1f} GiB with both there, {found.held_gib[1]:.1f} GiB without")
    print(f"the first time, which pins the machine's memory: {found.first_seconds:.1f} s")
    print(f"out {found.out_gib_per_second:.1f} GiB/s, in {found.in_gib_per_second:.1f} GiB/s")
    print(f"one out while the other comes in: {found.duplex_gib_per_second:.1f} GiB/s in all")
    print(
        f"exchange {found.transfer_seconds:.2f} s, matrix products {found.compute_seconds:.2f} s, together "
        f"{found.both_seconds:.2f} s: {found.hidden:.0%} of the exchange is hidden"
    )
    if options.json:
        options.json.write_text(json.dumps({**asdict(found), "hidden": found.hidden}) + "\n")


if __name__ == "__main__":
    main()
