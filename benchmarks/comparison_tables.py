"""What ``against_trl.py`` found, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from training_work import Measured, Work

PHASES = ("rollout", "verify", "learn", "rest")


def step_table(work: Work, sides: Sequence[Measured], matmul_flops: float | None) -> str:
    """Whole steps of all agents."""
    names = [*(f"{phase} s" for phase in PHASES), "gen tok", "gen tok/s", "learnt tok", "learnt tok/s"]
    names += ["learn MFU"] if matmul_flops else ["cpu s"]

    def cells(side: Measured) -> list[str]:
        row = [_seconds(side.median(phase)) for phase in PHASES]
        row += [f"{side.generated_tokens:,}", _rate(side.generated_tokens, side.median("rollout"))]
        row += [f"{side.learnt_tokens:,}", _rate(side.learnt_tokens, side.median("learn"))]
        if matmul_flops:
            return [*row, f"{side.learnt_flops / side.median('learn') / matmul_flops:.1%}"]
        return [*row, _seconds(side.median("cpu"))]

    rows = _rows("step s", names, sides, cells)
    shares = [
        f"{side.side}: {side.median('rest') / side.median():.1%} of a step is neither rollouts nor learning"
        for side in sides
        if not side.failure
    ]
    return "\n".join([_describe(work, matmul_flops), _aligned(rows), *shares, *_ratios(sides)])


def update_table(work: Work, sides: Sequence[Measured], matmul_flops: float | None) -> str:
    """Updates of one learner."""

    def cells(side: Measured) -> list[str]:
        speed = _rate(side.learnt_tokens, side.median())
        if matmul_flops:
            return [speed, f"{side.learnt_flops / side.median() / matmul_flops:.1%}"]
        return [speed]

    rows = _rows("update s", ["tok/s", *(["MFU"] if matmul_flops else [])], sides, cells)
    lines = [_describe(work, matmul_flops), _aligned(rows), *_ratios(sides)]
    peaks = {side.side: side.memory for side in sides if side.memory.get("beyond")}
    if len(peaks) == 2:
        ours, theirs = (peaks[side.side] for side in sides)
        parts = [f"{what} {theirs[what] / ours[what]:.2f}" for what in ("beyond", "allocated")]
        lines.append(f"memory, TRL / hacrl: {', '.join(parts)}")
    return "\n".join(lines)


def _rows(
    what: str, names: list[str], sides: Sequence[Measured], cells: Callable[[Measured], list[str]]
) -> list[list[str]]:
    """A head and a row for each side: its time, the given cells, its memory; or why it has none of them."""
    rows = [["", what, "min-max", *names, *_memory_names(sides)]]
    for side in sides:
        if side.failure:
            rows.append([side.side, side.failure])
            continue
        fastest, slowest = side.spread()
        times = [_seconds(side.median()), f"{_seconds(fastest)}-{_seconds(slowest)}"]
        rows.append([side.side, *times, *cells(side), *_memory(side, sides)])
    return rows


def _describe(work: Work, matmul_flops: float | None) -> str:
    peak = f"; bf16 matmul peak {matmul_flops / 1e12:.0f} TFLOP/s" if matmul_flops else ""
    given = work.given_prompt_tokens
    length = f"{given} tokens" if given else f"{work.prompt_letters} letters"
    return (
        f"{' + '.join(work.shapes)} on {work.device}: {work.prompts} x {work.samples} responses of "
        f"{work.new_tokens} tokens to prompts of {length}, "
        f"{work.updates} updates, micro-batches of {work.micro_batch}; {work.steps} steps after "
        f"{work.warmup} that do not count{peak}"
    )


def _ratios(sides: Sequence[Measured]) -> list[str]:
    theirs = [side for side in sides if side.side.startswith("TRL") and not side.failure]
    return [
        f"{trl.side} / {side.side}: step {trl.median() / side.median():.2f}, "
        f"fastest step {trl.spread()[0] / side.spread()[0]:.2f}"
        + (f", all steps {trl.total() / side.total():.2f}" if len(trl.seconds) == len(side.seconds) else "")
        + "".join(
            f", {phase} {trl.median(phase) / side.median(phase):.2f}"
            for phase in ("rollout", "learn", "cpu")
            if trl.median(phase) and side.median(phase)
        )
        for trl in theirs
        for side in sides
        if side is not trl and not side.failure
    ]


def _memory_names(sides: Sequence[Measured]) -> list[str]:
    names: dict[str, None] = {}
    for side in sides:
        names |= dict.fromkeys(side.memory)
    return [f"{name} GiB" for name in names]


def _memory(side: Measured, sides: Sequence[Measured]) -> list[str]:
    names = [name.removesuffix(" GiB") for name in _memory_names(sides)]
    return [f"{side.memory[name]:.2f}" if name in side.memory else "-" for name in names]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in rows
    )
