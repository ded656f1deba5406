"""Put a report into one HTML file that opens from disk and asks nothing of any network.

``page.html`` is built from ``web/`` (``make web``). Its content security policy allows only the script and
the styles that were built into it. Data are text in elements that no browser runs: compressed, then base64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hacrl.errors import ConfigError
from hacrl.files import write_text
from hacrl.report.rollouts import RolloutSampler, encode
from hacrl.report.runs import RunData
from hacrl.report.summary import clip_ranges, report_tables, summarise
from hacrl.report.tables import Table
from hacrl.report.tokens import find_token_texts

ROLLOUT_BYTES = 12 * 2**20  # of base64 in a page, for the rollouts of all its runs
DATA_PLACE = "<!-- data -->"
ROLLOUTS = "rollouts"  # folder of the rollout log in the run's folder


def write_report(runs: Sequence[RunData], path: Path) -> list[Table]:
    """Write the page; return the tables that it shows."""
    tables = report_tables(runs)
    summary = summarise(runs, tables)
    blocks: dict[str, str] = {}
    budget = ROLLOUT_BYTES // max(1, len(runs))
    for number, run in enumerate(runs):
        index, chunks = _sample(run_sampler(run), budget)
        summary["runs"][number]["rollouts"] = index
        blocks |= {f"rollouts-{number}-{step}": chunk for step, chunk in chunks.items()}
    blocks["summary"] = encode(summary)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, assemble(blocks))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; choose another -o FILE"
        ) from error
    return tables


def run_sampler(run: RunData) -> RolloutSampler:
    """Return a sampler of a run's rollouts."""
    models = {agent["name"]: agent["model"] for agent in run.config["agents"]}
    texts = {name: find_token_texts(run.folder, name, model) for name, model in models.items()}
    own_clip = clip_ranges(run.config["method"])["own"]
    return RolloutSampler(run.folder / ROLLOUTS, run.agents, texts, own_clip)


def _sample(sampler: RolloutSampler, budget: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the index of all steps, and the drawn rollouts of each. What a step leaves is the next ones'."""
    index, chunks = [], {}
    steps = sampler.steps
    for done, step in enumerate(steps):
        found = sampler.step(step, budget // (len(steps) - done))
        index.append(found.index())
        chunks[step] = found.encoded()
        budget = max(0, budget - len(chunks[step]))
    return index, chunks


def assemble(blocks: Mapping[str, str]) -> str:
    """Return the page with its data. Names are of hacrl's making; contents are base64: no markup."""
    elements = [
        f'<script type="application/gzip" id="{name}">{content}</script>' for name, content in blocks.items()
    ]
    return template().replace(DATA_PLACE, "\n".join(elements))


def template() -> str:
    """Return the page without data."""
    return (files("hacrl.report") / "page.html").read_text("utf-8")
