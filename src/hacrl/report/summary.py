"""Everything that a report shows but the rollouts themselves, as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl import __version__
from hacrl.config.load import dump_yaml
from hacrl.report.colours import agent_colours, method_colour
from hacrl.report.rollouts import ratio_bins
from hacrl.report.run_tables import run_tables
from hacrl.report.runs import RunData, Series
from hacrl.report.study_tables import find_study, study_curves, study_tables
from hacrl.report.tables import Cell, Spread, Table, texts

SCHEMA = 1
_DIGITS = 6  # significant ones, of numbers that are drawn


def summarise(runs: Sequence[RunData], tables: Sequence[Table], *, is_live: bool = False) -> dict[str, Any]:
    """Return what the page needs to know of all runs."""
    agents = dict.fromkeys(name for run in runs for name in run.agents)
    variants = dict.fromkeys(run.variant for run in runs)
    study = find_study(runs)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "live": is_live,
        "agentColours": agent_colours(agents),
        "variantColours": {variant: method_colour(variant) for variant in variants},
        "runs": [_run(run) for run in runs],
        "tables": [_table(table) for table in tables],
        "study": None if study is None else {"reference": study.reference, "curves": study_curves(study)},
    }


def report_tables(runs: Sequence[RunData]) -> list[Table]:
    """Return all tables of a report: those of a study, if the runs are one, and those of each run."""
    study = find_study(runs)
    tables = [] if study is None else study_tables(study)
    for number, run in enumerate(runs):
        tables += run_tables(run, f"{run.name}-" if len(runs) > 1 else "", number)
    return tables


def _run(run: RunData) -> dict[str, Any]:
    method = run.config["method"]
    clip = clip_ranges(method)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "variant": run.variant,
        "seed": run.seed,
        "method": method,
        "task": run.config["task"]["name"],
        "agents": [{"name": agent["name"], "model": agent["model"]} for agent in run.config["agents"]],
        "planned": run.config["steps"],
        "status": run.status,
        "config": dump_yaml(run.config),
        "steps": run.steps,
        "metrics": {name: _columns(columns) for name, columns in run.metrics.items()},
        "pairs": {
            learner: {source: _columns(columns) for source, columns in sources.items()}
            for learner, sources in run.pairs.items()
        },
        "dropped": run.dropped,
        "evaluations": run.evaluations,
        "seconds": _columns(run.seconds),
        "notes": run.notes,
        "totals": {name: totals(run, name) for name in run.agents},
        "clip": clip,
        "bins": {kind: [bins.low, bins.width] for kind, bins in ratio_bins(clip["own"]).items()},
    }


def totals(run: RunData, agent: str) -> dict[str, float]:
    """Return an agent's rollouts, sampled tokens and updates in all steps."""
    rollouts = _numbers(run.series(agent, "rollout/rollouts"))
    lengths = _numbers(run.series(agent, "rollout/response_tokens"))
    return {
        "rollouts": sum(rollouts),
        "tokens": round(math.fsum(n * length for n, length in zip(rollouts, lengths, strict=True))),
        "updates": sum(_numbers(run.series(agent, "learning/updates"))),
    }


def clip_ranges(method: Mapping[str, Any]) -> dict[str, list[float] | None]:
    """Return the range in which ratios carry a gradient: of own, and at first of other agents' responses."""
    own = None
    if "clip_low" in method and "clip_high" in method:
        own = [1 - method["clip_low"], 1 + method["clip_high"]]
    cross = own
    if "delta" in method:
        cross = (
            [1 - method["delta"], method.get("cross_upper", 1.0)] if method.get("cross_clip", True) else None
        )
    return {"own": own, "cross": cross}


def _table(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "kind": table.kind,
        "run": table.run,
        "columns": list(table.columns),
        "rows": [
            [_cell(cell, text) for cell, text in zip(row, shown, strict=True)]
            for row, shown in zip(table.rows, texts(table), strict=True)
        ],
    }


def _cell(cell: Cell, text: str) -> dict[str, Any]:
    """Return what is shown, the value, and the spread of a cell that has one."""
    if isinstance(cell, Spread):
        return {"t": text, "v": cell.mean, "s": cell.deviation}
    return {"t": text, "v": cell}


def _columns(columns: Mapping[str, Series]) -> dict[str, Series]:
    return {name: [_short(value) for value in values] for name, values in sorted(columns.items())}


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _numbers(values: Series) -> list[float]:
    return [value or 0.0 for value in values]
