"""The output of ``hacrl train RECIPE --dry-run``, as plain lines that also work in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from hacrl.config.load import config_to_yaml
from hacrl.memory.estimate import DeviceMemory
from hacrl.memory.offload_plan import describe_offload
from hacrl.models.footprint import Footprint
from hacrl.runs.dry_run import AgentPlan, DryRun

WIDTH = 100
GIB = 2**30
# heading and field of Footprint, in the order in which a run needs the memory
PARTS: tuple[tuple[str, str], ...] = (
    ("weights", "weights"),
    ("float32 master weights", "masters"),
    ("gradients", "gradients"),
    ("Adam's moments", "moments"),
    ("reference for KL", "reference"),
    ("vLLM engine that never sleeps", "engine"),
    ("= used all the time", "persistent"),
    ("generation: copy on rank 0", "copy"),
    ("generation: KV cache", "cache"),
    ("generation: other", "decoding"),
    ("training: gathered layers", "gathered"),
    ("training: activations", "activations"),
    ("training: logits, or", "logits"),
    ("training: backward pass", "backward"),
    ("update: optimizer", "update"),
    ("= largest of the three", "transient"),
    ("peak", "peak"),
)


def dry_run_lines(plan: DryRun) -> Iterator[str]:
    """Yield the config, agents, memory and work of a run, and at the end whether it is ready."""
    yield "# Config, every key with its value"
    yield config_to_yaml(plan.config).rstrip()
    yield from ("", "# Agents")
    yield from _agent_table(plan.agents)
    yield from ("", "# Estimated memory in GiB")
    yield from _memory_table([agent.footprint for agent in plan.agents if agent.footprint])
    yield from _rank_lines(plan)
    for memory in plan.devices:
        yield from _device_lines(memory)
    yield from ("", "# A step")
    yield from _step_lines(plan)
    remarks = [
        *(f"note: {note}" for note in plan.notes),
        *(f"WARNING: {warning}" for warning in plan.warnings),
        *(f"NOT CHECKED: {item}" for item in plan.not_checked),
    ]
    if remarks:
        yield ""
    for remark in remarks:
        yield from wrap(remark, WIDTH, subsequent_indent="  ", break_long_words=False)
    yield ""
    yield _verdict(plan)


def _verdict(plan: DryRun) -> str:
    marks = []
    if plan.warnings or any(not memory.fits for memory in plan.devices):
        marks.append("WARNING")
    if plan.not_checked:
        marks.append("NOT CHECKED")
    return f"ready, except for what is marked {' and '.join(marks)} above" if marks else "ready"


def _agent_table(agents: Sequence[AgentPlan]) -> Iterator[str]:
    rows = [("", *(agent.settings.name for agent in agents))]
    rows.append(("model", *(_shortened(_model(agent)) for agent in agents)))
    rows.append(("device", *(agent.device for agent in agents)))
    if any(agent.settings.ranks > 1 for agent in agents):
        rows.append(("ranks", *(str(agent.settings.ranks) for agent in agents)))
    known = [agent.footprint for agent in agents]
    rows.append(("parameters", *("unknown" if f is None else f"{f.counts.total:,}" for f in known)))
    rows.append(("trained", *("unknown" if f is None else _trained(f) for f in known)))
    rows.append(
        ("precision", *(a.settings.precision if (f := a.footprint) is None else f.precision for a in agents))
    )
    rows.append(
        ("stop tokens", *(" ".join(a.stop_tokens) if a.stop_tokens else "not checked" for a in agents))
    )
    rows.append(("sequences", *(agent.path or "not checked" for agent in agents)))
    lengths = [agent.longest_prompt for agent in agents]
    rows.append(("longest prompt", *("not checked" if n is None else f"{n:,} tokens" for n in lengths)))
    yield from _columns(rows)


def _model(agent: AgentPlan) -> str:
    endpoint = agent.settings.endpoint
    return agent.settings.model if endpoint is None else f"{endpoint.model} at {endpoint.url}"


def _trained(footprint: Footprint) -> str:
    trainable, total = footprint.counts.trainable, footprint.counts.total
    if trainable == 0:
        return "none (frozen)"
    return "all" if trainable == total else f"{trainable:,} ({trainable / total:.1%})"


def _shortened(model: str) -> str:
    return model if len(model) <= 40 else f"...{model[-37:]}"


def _memory_table(known: Sequence[Footprint]) -> Iterator[str]:
    if not known:
        yield "unknown"
        return
    rows = [("", *(footprint.agent for footprint in known))]
    for heading, part in PARTS:
        values = [getattr(footprint, part) for footprint in known]
        if any(values):
            rows.append((heading, *(_gib(value) for value in values)))
    yield from _columns(rows)


def _rank_lines(plan: DryRun) -> Iterator[str]:
    """Say what the numbers of agents with several ranks are."""
    for agent in plan.agents:
        ranks, footprint = agent.settings.ranks, agent.footprint
        if ranks > 1 and footprint is not None:
            yield f"{agent.settings.name}: memory of " + (
                f"its {ranks} ranks together"
                if agent.device == "cpu"
                else f"each of its {ranks} ranks; generation is on rank 0 alone"
            )


def _device_lines(memory: DeviceMemory) -> Iterator[str]:
    agents = ", ".join(memory.agents)
    available = f"{_gib(memory.available)} GiB available"
    if memory.needed is None:
        yield f"{memory.device} ({agents}): needs an unknown amount, {available}"
        return
    yield f"{memory.device} ({agents}): needs about {_gib(memory.needed)} GiB, {available}"
    if memory.offload != "never":
        yield f"  {describe_offload(memory.offload, 'it')}: {_gib(memory.host)} GiB of host memory"
    elif memory.host:
        yield f"  fsdp.cpu_offload keeps shards of all ranks in {_gib(memory.host)} GiB of host memory"
    if memory.fits:
        return
    yield f"WARNING: the run does not fit on {memory.device}. Each of these changes helps:"
    rows = [(f"  {advice.change}", f"about {_gib(advice.needed)} GiB") for advice in memory.advice]
    yield from _columns(rows)


def _step_lines(plan: DryRun) -> Iterator[str]:
    config, rollouts = plan.config, plan.rollouts_per_step
    prompts = config.rollout.prompts_per_step
    generated = ", ".join(f"{name} {count:,}" for name, count in rollouts.items())
    yield f"{prompts} prompts; rollouts: {generated}"
    if config.rollout.stop_strings:
        yield f"responses end at {' or '.join(map(repr, config.rollout.stop_strings))}"
    source = "all agents' rollouts" if config.method.shares_rollouts else "its own rollouts"
    learners = config.learners
    who = "each agent" if len(learners) == len(config.agents) else " and ".join(one.name for one in learners)
    yield f"{who} trains on {source} in {plan.updates_per_step} updates"
    total, updates = sum(rollouts.values()) * config.steps, plan.updates_per_step * config.steps
    yield f"{config.steps} steps: {total:,} rollouts, {updates:,} updates per agent"
    if plan.train_problems is not None:
        test = min(config.evaluation.most_problems, plan.test_problems or 0)
        passes = prompts * config.steps / plan.train_problems
        yield (
            f"{plan.train_problems:,} training problems, each used {passes:.2g} times; "
            f"{test:,} held-out problems for the evaluation"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}" if size >= GIB / 10 else f"{size / GIB:,.3f}"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield aligned lines: the first column to the left, all others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        yield "  ".join(cells).rstrip()
