"""``hacrl agents``."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from hacrl.models import smollm2
from hacrl.models.model_sources import bundled_agents


def list_agents() -> None:
    """Print a table of the bundled agents."""
    table = Table(title="Bundled agents")
    table.add_column("model", no_wrap=True)  # a user copies it into a recipe
    for heading in ("architecture", "layers", "width", "vocabulary"):
        table.add_column(heading)
    for name, folder in bundled_agents().items():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        numbers = (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"])
        table.add_row(f"bundled:{name}", config["architectures"][0], *map(str, numbers))
    console = Console()
    console.print(table)
    others = (
        f"A recipe may also name {smollm2.REFERENCE}, any Hugging Face id, or the folder of a model "
        "(docs/agents.md)."
    )
    console.print(others, highlight=False, soft_wrap=True)
