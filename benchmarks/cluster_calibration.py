"""Steps that were measured on one H200 beside the simulation of the same work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster_costs import MODELS, Costs, Lengths, Plan
from cluster_run import Run, Sharing, Spent

STEPS = 3
# docs/performance.md, "A whole step against TRL": the first step takes 36 to 46 s longer, for two agents of
# one architecture. Agents of another architecture compile their own layers.
COMPILING = 41.0
# Length of a response of random ids in the other tokenizer of benchmarks/shapes.py (tests measure it).
FOREIGN_LENGTH = 1.45
# docs/performance.md, "Memory beside TRL": seconds of offloaded copies per micro-batch.
OFFLOADED_COPIES = 0.06
SOURCE, CHECK = "source of a constant", "check"


@dataclass(frozen=True)
class Row:
    """One measurement, in seconds."""

    what: str
    measured: float
    simulated: float
    note: str

    @property
    def error(self) -> float:
        """Relative."""
        return self.simulated / self.measured - 1


def simulate(plans: Sequence[Plan], cross: bool = True, costs: Costs | None = None) -> tuple[float, Spent]:
    """Return the seconds of a step, and what the first agent spent in a step."""
    spent = Run(plans, STEPS, sharing=Sharing(cross=cross), costs=costs).run()
    first = spent[0]
    first.phases = {phase: seconds / STEPS for phase, seconds in first.phases.items()}
    return max(one.end for one in spent) / STEPS, first


def calibrate() -> list[Row]:
    """Return all rows."""
    own_weights = Costs(sync=0.0, sync_per_parameter=0.0)  # the transformers engine has the learner's weights
    work = Plan(
        "a",
        MODELS["0.6b"],
        engine="transformers",
        slots=512,
        prompts=32,
        prompt_tokens=128,
        lengths=Lengths(256, 0.0, 256),
        verify=0.0,
    )
    rows = []
    # docs/performance.md, "Rollouts": tokens/s
    for engine, speed in (("transformers", 61_245), ("vllm", 27_798)):
        _, spent = simulate([replace(work, engine=engine)], cross=False)
        what = f"rollouts, 0.6B, {engine} engine, 65,536 tokens"
        rows.append(Row(what, 32 * 8 * 256 / speed, spent.phases["sampling"], SOURCE))
    # docs/performance.md, "A whole step against TRL"
    pair = replace(work, prompt_tokens=165)
    step, _ = simulate([pair, replace(pair, name="b", gpus_of="a")], costs=own_weights)
    rows.append(
        Row("HACPO step, 2 x 0.6B, 32 x 8 x 256 tokens", 4.52, step, "check; its learning is a source")
    )
    # benchmarks/measured/learn_hacrl_stream.json
    single = replace(work, model=MODELS["1.7b"], lengths=Lengths(1024, 0.0, 1024))
    for is_checkpointing, seconds in ((False, 6.8), (True, 8.37)):
        _, spent = simulate([replace(single, checkpointing=is_checkpointing)], cross=False)
        what = "learning, 1.7B, 32 x 8 x 1,024 tokens" + (", checkpointing" if is_checkpointing else "")
        rows.append(Row(what, seconds, spent.phases["learning"], SOURCE))
    rows += [*_paper_pair(single, own_weights), _vllm_pair(), _many_small_runs(work, own_weights)]
    return rows


def _paper_pair(single: Plan, costs: Costs) -> list[Row]:
    """docs/performance.md, "The paper's pair": the first step of a run, and its two parts."""
    small = replace(single, prompts=128, prompt_tokens=165, updates=4)
    large = replace(small, name="b", model=MODELS["4b"], tokenizer="other", gpus_of="a")
    step, _ = simulate([small, large], costs=replace(costs, foreign_length=FOREIGN_LENGTH))
    micro_batches = 2 * 128 * 8 * 1024 * (1 + FOREIGN_LENGTH) / 8192
    step += 2 * COMPILING + OFFLOADED_COPIES * micro_batches
    alone = [simulate([replace(plan, gpus_of=None)], cross=False)[1] for plan in (small, large)]
    sampling = sum(spent.phases["sampling"] for spent in alone)
    note = "check: one step, with compilation"
    return [
        Row("HACPO step, 1.7B + 4B, 128 x 8 x 1,024 tokens", 471.0, step, note),
        Row("... its rollouts", 107.0, sampling, "check: contexts of up to 1,189 tokens"),
        Row("... the rest: learning, compilation", 364.0, step - sampling, "check"),
    ]


def _vllm_pair() -> Row:
    """docs/vllm.md, "Measured": 16 prompts x 8 responses of 128 tokens, engines one after the other."""
    first = Plan(
        "a", MODELS["0.6b"], prompts=16, prompt_tokens=128, lengths=Lengths(128, 0.0, 128), verify=0.0
    )
    seconds = 0.0
    for plan in (first, replace(first, model=MODELS["0.5b"])):
        _, spent = simulate([plan], cross=False)
        seconds += spent.phases["sampling"] + spent.phases["weight sync"]
    measured = 16_384 / 18_900 + 0.25 + 16_384 / 17_900 + 0.24
    return Row("rollouts and weight sync, 0.6B + 0.5B, vLLM, 16 x 8 x 128 tokens", measured, seconds, CHECK)


def _many_small_runs(work: Plan, costs: Costs) -> Row:
    """docs/results.md: nine runs of 50 steps at once take six minutes, so at most 0.8 s a step and run."""
    large = replace(work, model=MODELS["135m"], prompt_tokens=150, lengths=Lengths(48, 0.0, 48), updates=4)
    small = replace(large, name="b", model=replace(MODELS["135m"], parameters=3.3e6, layers=4), gpus_of="a")
    step, _ = simulate([large, replace(small, tokenizer="other")], costs=costs)
    note = "check: at most, with starting and evaluating, nine runs at once"
    return Row("HACPO step, SmolLM2-135M + 3.3M", 360 / 9 / 50, step, note)
