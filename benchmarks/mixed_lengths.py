"""Responses of mixed lengths: time of the transformers engine's decoding against the ideal schedule.

    python benchmarks/mixed_lengths.py --shape qwen3-0.6b --prompts 64 --samples 8 --slots 256
    python benchmarks/mixed_lengths.py --device cpu --threads 1 --prompts 8 --samples 4 --slots 8 --longest 64

Every response has a length of its own, drawn between the shortest and the longest; the engine does not know
it before it is reached. The ideal schedule knows all of them, starts the longest first and keeps every slot
full as long as there is work. Its steps cost what the engine's own steps were measured to cost at that batch
size and at the mean number of tokens that a step reads for a response; it pays nothing for prompts, for
looking who has ended, or for text.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from ideal_schedule import StepTimes, in_batches, longest_first, seconds_of
from rollout_work import make_problems
from shapes import SHAPES, make_agent
from timing import timed

from hacrl.config.schema import AgentSettings
from hacrl.engines.hf.continuous_batching import FinishedRequest, Prompts, Request, decode_all
from hacrl.engines.hf.slot_decoder import Group, SlotDecoder
from hacrl.models.agent import Agent
from hacrl.models.compile import compiles_by_default
from hacrl.types import Sampling

MEASURED_STEPS = 64
REPEATS = 3


@torch.inference_mode()
def step_times(agent: Agent, decoder: SlotDecoder, sizes: Sequence[int], context: int) -> StepTimes:
    """Seconds of a step alone at each batch size, if every response reads so many tokens of its own."""
    prompt = agent.encode_prompt(make_problems(agent, 1, context - MEASURED_STEPS // 2, seed=1)[0])
    measured = {}
    for size in sizes:
        times = []
        for _ in range(REPEATS + 1):
            decoder.reset(seed=0)
            states = Prompts(agent.model, [prompt]).states(prompt)
            decoder.admit(  # numbered apart: none reads another's
                [
                    Group(replace(states, number=slot), prompt[-1], [slot], [MEASURED_STEPS], [0], [0])
                    for slot in range(size)
                ]
            )
            batch = decoder.select(list(range(size)))

            def steps(batch: int = batch) -> None:
                for _ in range(MEASURED_STEPS):
                    decoder.step(batch)

            times.append(timed(steps) / MEASURED_STEPS)
        measured[size] = statistics.median(times[1:])
    return StepTimes(measured)


@torch.inference_mode()
def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Rounds of the engine, and what the ideal schedule would take."""
    dtype = getattr(torch, options.dtype or ("float32" if options.device == "cpu" else "bfloat16"))
    model = make_agent(options.shape, folder / "agent", dtype, options.device, stops=False)
    settings = AgentSettings(name="agent", model=str(model), precision=str(dtype).removeprefix("torch."))
    agent = Agent.load(settings, options.device)
    problems = make_problems(agent, options.prompts, options.prompt_tokens, seed=0)
    prompts = [agent.encode_prompt(problem) for problem in problems]
    rng = random.Random(options.seed)
    lengths = [
        rng.randint(options.shortest, options.longest) for _ in range(options.prompts * options.samples)
    ]
    sampling = Sampling(max(options.longest, MEASURED_STEPS))
    length = options.prompt_tokens + sampling.max_new_tokens
    compiles = compiles_by_default(agent.model)  # as the engine does
    decoder = SlotDecoder(agent.model, options.slots, length, sampling, sorted(agent.stop_ids), compiles)
    requests = [
        Request(place, prompts[place // options.samples], limit) for place, limit in enumerate(lengths)
    ]
    texts: dict[int, str] = {}

    def on_finished(ended: Sequence[FinishedRequest]) -> None:
        decoded = agent.decode_responses(
            [one.token_ids for _, one in ended], [one.prompt for one, _ in ended]
        )
        texts.update(zip((request.index for request, _ in ended), decoded, strict=True))

    rounds = [
        timed(lambda number=number: decode_all(decoder, requests, number, on_finished))  # type: ignore[misc]
        for number in range(options.rounds + 1)
    ]
    assert len(texts) == len(requests)
    sizes = [2**power for power in range(options.slots.bit_length()) if 2**power < options.slots]
    # a step's mean position within a response (long ones are met more often), and its part of a shared prompt
    position = sum(length**2 for length in lengths) / (2 * sum(lengths))
    mean_context = position + options.prompt_tokens / options.samples
    times = step_times(agent, decoder, [*sizes, options.slots], int(mean_context))
    took = statistics.median(rounds[1:])
    ideal = seconds_of(longest_first(lengths, options.slots), times)
    return {
        "shape": options.shape,
        "responses": len(lengths),
        "tokens": sum(lengths),
        "slots": options.slots,
        "warm_up_s": rounds[0],
        "rounds_s": rounds[1:],
        "median_s": took,
        "tokens_per_s": sum(lengths) / took,
        "ideal_s": ideal,
        "against_ideal": took / ideal,
        "batches_s": seconds_of(in_batches(lengths, options.slots), times),
        "step_ms": {size: 1000 * times.at(size) for size in [*sizes, options.slots]},
    }


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=256, help="responses decoded side by side")
    parser.add_argument("--rounds", type=int, default=3, help="counted ones")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
