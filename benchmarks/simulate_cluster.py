"""Simulate runs on up to 1,000 GPUs: where time goes, what asynchrony gains, when agents stop paying.

    python benchmarks/simulate_cluster.py                        # calibration and the three tables
    python benchmarks/simulate_cluster.py --plot docs/images/cluster.png --json cluster.json
    python benchmarks/simulate_cluster.py --only fleet --steps 50

Nothing is run on a GPU. ``cluster_costs.py`` scales what was measured on one H200 to other models and more
GPUs, ``cluster_run.py`` lets the agents wait for each other as hacrl's trainer does. The calibration compares
simulated with measured seconds and says which of them are sources of the constants. Equal seeds give equal
results.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster_calibration import calibrate
from cluster_costs import MODELS, Lengths, Plan
from cluster_run import PHASES, Mode, Run, Sharing

SHORT, LONG = Lengths(1024, 0.3, 8192), Lengths(1024, 1.0, 8192)  # 1,070 and about 1,590 tokens on average
COLOURS = ("#0072B2", "#56B4E9", "#999999", "#E69F00", "#F0E442", "#D55E00", "#009E73")


@dataclass(frozen=True)
class Result:
    """One simulated run."""

    name: str
    mode: str
    agents: int
    gpus: int
    step: float  # seconds; the slowest agent's
    mean_step: float  # seconds, mean over agents
    phases: dict[str, float]  # seconds a step, mean over agents
    driver: float  # share of the time in which the driver is busy
    taught: float  # share of other agents' batches that learners learnt from; the last may come after the end
    dropped: int  # other agents' batches that came too late, in all
    staleness: float  # mean over agents and steps


@dataclass(frozen=True)
class Gain:
    """n agents together beside one that samples alone as many responses as each of them learns from."""

    cap: int | None
    learnt: int  # responses per prompt
    alone: float  # seconds of a step
    together: Result

    @property
    def gain(self) -> float:
        """How many times faster the step is together."""
        return self.alone / self.together.step


def simulate(
    name: str,
    plans: Sequence[Plan],
    steps: int,
    mode: Mode | None = None,
    sharing: Sharing | None = None,
    seed: int = 0,
) -> Result:
    """Run one simulation."""
    mode = mode or Mode()
    run = Run(plans, steps, mode, sharing, seed=seed)
    spent = run.run()
    text = "synchronous" if mode.is_synchronous else f"max_staleness {mode.max_staleness}"
    text += f", patience {mode.patience:g} s" if mode.patience < math.inf else ""
    total, end = len(spent) * steps, max(one.end for one in spent)
    return Result(
        name=name,
        mode=text,
        agents=len(plans),
        gpus=sum(plan.gpus for plan in plans if plan.gpus_of is None),
        step=end / steps,
        mean_step=sum(one.end for one in spent) / total,
        phases={phase: sum(one.phases[phase] for one in spent) / total for phase in PHASES},
        driver=run.driver.busy / max(end, run.clock.now),
        taught=sum(one.taken for one in spent) / max(1, total * (len(spent) - 1)),
        dropped=sum(one.dropped for one in spent),
        staleness=sum(one.staleness for one in spent) / total,
    )


# Placements


def fleet(agents: int) -> list[Plan]:
    """Return agents of 1.7B to 32B; 64 of them have 1,000 GPUs."""
    # model, learner ranks, engines, tensor parallel: 5 + 8 + 8 + 12 + 12 + 16 + 16 + 48 = 125 GPUs
    kinds = [
        ("1.7b", 2, 3, 1),
        ("4b", 4, 4, 1),
        ("4b", 4, 4, 1),
        ("8b", 6, 6, 1),
        ("8b", 6, 6, 1),
        ("14b", 8, 8, 1),
        ("14b", 8, 8, 1),
        ("32b", 16, 8, 4),
    ]
    plans = []
    for number in range(agents):
        model, ranks, engines, tensor_parallel = kinds[number % len(kinds)]
        plans.append(
            Plan(
                f"agent{number}",
                MODELS[model],
                ranks=ranks,
                engines=engines,
                tensor_parallel=tensor_parallel,
                colocated=False,
                lengths=LONG,
                updates=2,
                tokenizer=f"tokenizer {number % 4}",
            )
        )
    return plans


def placements() -> dict[str, tuple[list[Plan], Sharing]]:
    """Return the placements of docs/scaling.md."""
    work = Plan("first", MODELS["8b"], ranks=4, lengths=LONG, updates=2, checkpointing=True)
    apart = replace(work, ranks=2, tensor_parallel=2, colocated=False)
    on_hosts = replace(work, tensor_parallel=4, colocated=False)
    hosts = [
        replace(on_hosts, name=f"agent{number}", model=MODELS[model], tokenizer=model)
        for number, model in enumerate(("8b", "8b", "14b", "14b"))
    ]
    small = replace(on_hosts, name="small", model=MODELS["7b"], tokenizer="other")
    large = replace(on_hosts, name="large", model=MODELS["70b"], ranks=16, tensor_parallel=8)
    large = replace(large, micro_batch=16_384)
    return {
        "2 x 8B, 8 GPUs, engine on one GPU of four": ([work, replace(work, name="second")], Sharing()),
        "2 x 8B, 8 GPUs, engines apart": ([apart, replace(apart, name="second")], Sharing()),
        "4 agents, 4 hosts, cap 8": (hosts, Sharing(cap=8)),
        "70B and 7B, 32 GPUs": ([large, small], Sharing()),
        "64 agents, 1,000 GPUs, cap 8": (fleet(64), Sharing(cap=8)),
    }


# Sweeps

MODES = (Mode(), Mode(1), Mode(4), Mode(1, 30.0), Mode(4, 30.0))


def staleness_sweep(steps: int, seed: int = 0) -> list[Result]:
    """Return four agents in all modes: equal ones with short and long tails, and three with a slow fourth."""
    agent = Plan("agent0", MODELS["4b"], ranks=2, engines=2, colocated=False, lengths=LONG, updates=2)
    equal = [replace(agent, name=f"agent{number}") for number in range(4)]
    slow = Plan("slow", MODELS["32b"], ranks=8, engines=1, tensor_parallel=4, colocated=False, lengths=LONG)
    cases = {
        "4 x 4B, short tail": [replace(plan, lengths=SHORT) for plan in equal],
        "4 x 4B, long tail": equal,
        "3 x 4B and a slow 32B": [*equal[:3], replace(slow, updates=2)],
    }
    sharing = Sharing(cap=8)
    return [
        simulate(name, plans, steps, mode, sharing, seed) for name, plans in cases.items() for mode in MODES
    ]


def agents_sweep(steps: int, seed: int = 0) -> list[Gain]:
    """Return what 1 to 64 agents of 4B with 8 GPUs each gain over agents that sample as much alone."""
    base = Plan("agent0", MODELS["4b"], ranks=4, engines=4, colocated=False, lengths=LONG, updates=2)
    found = []
    for cap in (None, 8):
        for agents in (1, 2, 4, 8, 16, 32, 64):
            plans = [replace(base, name=f"agent{i}", tokenizer=str(i % 4)) for i in range(agents)]
            together = simulate(f"{agents} agents", plans, steps, sharing=Sharing(cap=cap), seed=seed)
            others = base.responses * (agents - 1)
            learnt = base.responses + (others if cap is None else min(cap, others))
            one = [replace(base, responses=learnt)]
            alone = simulate("alone", one, steps, sharing=Sharing(cross=False), seed=seed)
            found.append(Gain(cap, learnt, alone.step, together))
    return found


# Output


def print_results(title: str, results: Sequence[Result]) -> None:
    """Print seconds of a step by phase."""
    heads = "".join(f"{phase:>14s}" for phase in PHASES)
    print(f"\n{title}: seconds of a step, mean over agents\n{'':42s}  GPUs    step{heads}  driver  taught")
    for one in results:
        phases = "".join(f"{one.phases[phase]:14.1f}" for phase in PHASES)
        print(
            f"{one.name:42s} {one.gpus:5d} {one.mean_step:7.1f}{phases}  {one.driver:6.0%}  {one.taught:6.0%}"
            f"  {one.mode}"
        )


def print_gains(gains: Sequence[Gain]) -> None:
    """Print the step of n agents together beside that of an agent that samples as many responses alone."""
    print("\nAgents of 4B with 8 GPUs each")
    print("agents   cap  learnt a prompt  together, s   alone, s   gain  driver")
    for one in gains:
        print(
            f"{one.together.agents:6d} {one.cap or '-':>5}  {one.learnt:15d}  {one.together.step:11.1f}  "
            f"{one.alone:9.1f}  {one.gain:5.2f}  {one.together.driver:6.0%}"
        )


def plot(path: Path, placed: Sequence[Result], stale: Sequence[Result], gains: Sequence[Gain]) -> None:
    """Draw where a step's time goes, what asynchrony gains, and when agents stop paying."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(15, 5.6), layout="constrained", width_ratios=[1.7, 1, 1]
    )
    names = []
    for place, one in enumerate(placed):
        start, whole = 0.0, sum(one.phases.values())
        for phase, colour in zip(PHASES, COLOURS, strict=True):
            share = one.phases[phase] / whole
            left.barh(place, share, left=start, color=colour, label=phase if place == 0 else None)
            start += share
        left.text(1.01, place, f"{one.mean_step:.0f} s", va="center", fontsize=9)
        names.append(f"{one.name}\n{one.mode}")
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.invert_yaxis()
    left.set_xlim(0, 1.1)
    left.set_xlabel("share of a step, mean over agents")
    left.set_title("Where a step's time goes", fontsize=10)
    left.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.1))
    cases = list(dict.fromkeys(one.name for one in stale))
    for number, (case, colour) in enumerate(zip(cases, COLOURS[::2], strict=False)):
        chosen = [one for one in stale if one.name == case]
        speeds = [chosen[0].mean_step / one.mean_step for one in chosen]
        places = [place + 0.27 * (number - 1) for place in range(len(speeds))]
        middle.bar(places, speeds, 0.25, color=colour, label=case)
    modes = [one.mode.replace("max_staleness", "S =").replace(", ", ",\n") for one in stale[: len(MODES)]]
    middle.set_xticks(range(len(modes)), modes, fontsize=8, rotation=35, ha="right")
    middle.axhline(1, color="black", linewidth=0.6)
    middle.set_ylabel("speed, synchronous = 1")
    middle.set_ylim(0, 2.6)  # room for the legend
    middle.set_title("What asynchrony gains (S: max_staleness)", fontsize=10)
    middle.legend(frameon=False, fontsize=8, loc="upper left")
    for cap, colour, label in (
        (None, COLOURS[5], "all are learnt"),
        (8, COLOURS[0], "others' capped at G = 8"),
    ):
        chosen_gains = [one for one in gains if one.cap == cap]
        agents = [one.together.agents for one in chosen_gains]
        right.semilogx(agents, [one.gain for one in chosen_gains], "o-", color=colour, label=label)
    right.axhline(1, color="black", linewidth=0.6)
    right.set_xticks(agents, [str(number) for number in agents])
    right.minorticks_off()
    right.set_xlabel("agents of 4B, 8 GPUs each")
    right.set_ylabel("time alone, with as many responses / together")
    right.set_title("When agents stop paying", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Simulate, print, and write JSON and the plot if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["calibration", "placements", "fleet", "staleness", "agents"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    steps, seed, only = options.steps, options.seed, options.only
    placed: list[Result] = []
    stale: list[Result] = []
    gains: list[Gain] = []
    if only in (None, "calibration"):
        print(f"{'calibration, seconds':66s} measured  simulated   error")
        for row in calibrate():
            print(f"{row.what:66s} {row.measured:8.2f}  {row.simulated:9.2f}  {row.error:+6.0%}  {row.note}")
    if only in (None, "placements", "fleet"):
        for name, (plans, sharing) in placements().items():
            if only != "fleet" or len(plans) == 64:
                has_own_gpus = not any(plan.colocated for plan in plans)
                for mode in (Mode(), Mode(1))[: 1 + has_own_gpus]:  # else sampling cannot overlap learning
                    placed.append(simulate(name, plans, steps, mode, sharing, seed))
        print_results("Placements", placed)
    if only in (None, "staleness"):
        stale = staleness_sweep(steps, seed)
        print_results("Asynchrony", stale)
    if only in (None, "agents"):
        gains = agents_sweep(max(2, steps // 3), seed)
        print_gains(gains)
    if options.json:
        content = {
            "placements": [asdict(one) for one in placed],
            "staleness": [asdict(one) for one in stale],
            "agents": [asdict(one) for one in gains],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    if options.plot:
        plot(options.plot, placed, stale, gains)


if __name__ == "__main__":
    main()
