"""Tables of variants of one method that differ in one setting: ablations, and values such as alpha.

The settings themselves say which variants these are: the configs of two runs differ in one key.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hacrl.report.statistics import TEST, holm, paired_difference
from hacrl.report.tables import Cell, Spread, Table

if TYPE_CHECKING:
    from hacrl.report.study_tables import StudyRuns

_NOT_SETTINGS = ("seed", "output")  # keys in which runs of one variant differ
Value = object


@dataclass(frozen=True)
class Family:
    """A variant, and others that differ from it in one setting each."""

    base: str
    settings: dict[str, Value]  # of the base
    changed: dict[str, tuple[str, Value]]  # variant -> key and value


def ablation_tables(study: StudyRuns) -> list[Table]:
    """Return one table for each setting that has three values or more, and one for all other changes."""
    tables = []
    for family in families(study):
        keys = [key for key, _ in family.changed.values()]
        scales = {key for key in keys if _is_scale(family, key)}
        tables += [_scale_table(study, family, key) for key in dict.fromkeys(keys) if key in scales]
        single = {name: change for name, change in family.changed.items() if change[0] not in scales}
        if single:
            rows = [(family.base, "–"), *((name, _change(*change)) for name, change in single.items())]
            tables.append(
                _table(
                    study,
                    family.base,
                    f"study-ablations-{family.base}",
                    f"Ablations of {family.base}",
                    ("variant", "change"),
                    rows,
                )
            )
    return tables


def families(study: StudyRuns) -> list[Family]:
    """Return the study's methods of which several variants differ in one setting."""
    settings = {
        variant: dict(_flat(study.runs[variant, study.seeds[0]].config)) for variant in study.variants
    }
    found = []
    for method in dict.fromkeys(values.get("method.name") for values in settings.values()):
        members = [name for name in study.variants if settings[name].get("method.name") == method]
        changes = {
            base: {
                other: keys[0]
                for other in members
                if other != base and len(keys := _different(settings[base], settings[other])) == 1
            }
            for base in members
        }
        base = max(members, key=lambda name: len(changes[name]))  # the first of those with most neighbours
        if changes[base]:
            changed = {name: (key, settings[name].get(key)) for name, key in changes[base].items()}
            found.append(Family(base, settings[base], changed))
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in config.items():
        if prefix or key not in _NOT_SETTINGS:
            if isinstance(value, Mapping):
                yield from _flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value


def _different(one: Mapping[str, Value], other: Mapping[str, Value]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def _is_scale(family: Family, key: str) -> bool:
    values = [family.settings.get(key), *(value for name, value in family.changed.values() if name == key)]
    return len(values) > 2 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _scale_table(study: StudyRuns, family: Family, key: str) -> Table:
    name = key.rpartition(".")[2]
    points: list[tuple[str, Value]] = [(family.base, family.settings[key])]
    points += [(variant, value) for variant, (changed, value) in family.changed.items() if changed == key]
    points.sort(key=lambda point: float(str(point[1])))
    rows = [(variant, f"{value:g}") for variant, value in points]
    title = f"{family.base} by {name}"
    return _table(study, family.base, f"study-{name}-{family.base}", title, ("variant", name), rows)


def _change(key: str, value: Value) -> str:
    return f"{key.removeprefix('method.')} = {str(value).lower() if isinstance(value, bool) else value}"


def _table(
    study: StudyRuns,
    base: str,
    name: str,
    title: str,
    headings: tuple[str, str],
    labels: Sequence[tuple[str, str]],
) -> Table:
    """Return accuracies by agent, and the difference of their mean from the base."""
    mean = study.finals_of_all
    found = {
        variant: paired_difference(mean(variant), mean(base)) for variant, _ in labels if variant != base
    }
    corrected = dict(zip(found, holm([one.p_value for one in found.values()]), strict=True))
    rows: list[tuple[Cell, ...]] = []
    for variant, label in labels:
        cells: list[Cell] = [spread_over_seeds(study.finals(variant, agent)) for agent in study.agents]
        cells.append(spread_over_seeds(mean(variant)))
        if variant == base:
            cells += [None] * 5
        else:
            one = found[variant]
            cells += [one.mean, one.low, one.high, one.p_value, corrected[variant]]
        rows.append((variant, label, *cells))
    return Table(
        name,
        title,
        (*headings, *study.agents, "mean", "difference", "low", "high", "p", "p, corrected"),
        tuple(rows),
        f"±: standard deviation over {len(study.seeds)} seeds. Difference of the mean from {base}, paired by "
        f"seed; low and high: 95% confidence, Student's t. Test: {TEST}.",
        kind="study",
    )


def spread_over_seeds(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of one value for each seed."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
