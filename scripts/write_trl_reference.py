"""Write docs/from_trl.md from src/hacrl/config/trl_names.py.

python scripts/write_trl_reference.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hacrl.config.trl_names import CONFIG_NAMES, EARLIER_NAMES, MEMBER_NAMES, TRAINER_NAMES, TrlName

PAGE = Path(__file__).parent.parent / "docs" / "from_trl.md"
_KINDS = {"works": "the same", "renamed": "renamed", "differs": "differs", "absent": "none"}

_HEAD = """# From TRL

Every name of TRL's `GRPOConfig` and `GRPOTrainer` (TRL 1.16), and what hacrl has for it. hacrl answers a name
that it does not have with an error that says the same, in Python, in a recipe and in an override on the
command line. `args=GRPOConfig(...)` is answered with the `HACRLConfig(...)` to write instead.

Reward functions work unchanged, `log_metric`, `log_extra` and `trainer_state` included
([tasks](tasks.md#reward-your-own-functions)). Callbacks of transformers work too
([Python](python_api.md#callbacks)).

| | |
|---|---|
| the same | hacrl takes the name, with the same meaning |
| renamed | another name for the same value |
| differs | another way to the same end; the note says how |
| none | the note says why |

A key such as `learning.lr` is `learning: {lr: ...}` in a recipe, `learning.lr=...` on the command line, and
`learning={"lr": ...}` in `HACRLConfig`. `agent_defaults` holds for all agents; an agent may have its own.

`scripts/write_trl_reference.py` writes this page from `src/hacrl/config/trl_names.py`.
"""


def trl_page() -> str:
    """Return ``docs/from_trl.md``."""
    sections = (
        ("`GRPOTrainer`: parameters", TRAINER_NAMES),
        ("`GRPOTrainer`: methods and attributes", MEMBER_NAMES),
        ("`GRPOConfig`", {**CONFIG_NAMES, **EARLIER_NAMES}),
    )
    return "\n".join([_HEAD, *(line for heading, rows in sections for line in _section(heading, rows))])


def _section(heading: str, rows: Mapping[str, TrlName]) -> list[str]:
    """Return one table, in which names with the same answer share a row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows.values():
        groups.setdefault((_KINDS[row.kind], _here(row), row.note), []).append(f"`{row.name}`")
    lines = [f"## {heading}", "", "| TRL | | hacrl | note |", "|---|---|---|---|"]
    for (kind, here, note), names in groups.items():
        lines.append(f"| {', '.join(names)} | {kind} | {here} | {note} |")
    return [*lines, ""]


def _here(row: TrlName) -> str:
    if row.kind == "works":
        return "" if row.here == row.name else f"in a recipe `{row.here}`"
    return f"`{row.here}`" if row.here else ""


if __name__ == "__main__":
    PAGE.write_text(trl_page(), encoding="utf-8")
