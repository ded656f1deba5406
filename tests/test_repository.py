"""Rules of the repository, as tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hacrl.config.load import load_config
from hacrl.config.method import METHOD_SETTINGS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hacrl"

# From top to bottom: a layer imports only lower layers.
LAYERS = [
    "cli",
    "api",
    "studies",
    "report",
    "evaluation",
    "runs",
    "tracking",
    "executors",
    "memory",
    "training",
    "engines",
    "models",
    "rollouts",
    "tasks",
    "environments",
    "algorithms",
    "config",
    "seeding",
    "files",
    "plugins",
    "processes",
    "errors",
    "plain_text",
    "types",
    "json_values",
]
# Modules that take long to import.
HEAVY = ("torch", "transformers", "matplotlib", "numpy")


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "hacrl" and len(parts) > 1 else None


def test_imports_point_downward_only():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        own = layer_of("hacrl." + ".".join(path.relative_to(SOURCE).with_suffix("").parts))
        if own in ("__init__", "__main__"):
            continue
        for module in imports_of(path):
            other = layer_of(module)
            if other is not None and LAYERS.index(other) < LAYERS.index(own):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_the_guide_for_contributors_names_the_layers():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == LAYERS


def test_no_branch_on_the_algorithm_outside_its_lookup():
    """Only algorithms/methods.py and the settings' union may depend on a method's name."""
    wrong = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Compare):
                continue
            constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
            if constants & set(METHOD_SETTINGS) and path.name != "variants.py":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_parses(recipe: Path):
    config = load_config(recipe)
    assert config.output == f"runs/{recipe.stem}"
    assert len({agent.name for agent in config.agents}) == len(config.agents)


def heavy_modules_after(code: str, heavy: Sequence[str] = HEAVY) -> str:
    """What of ``heavy`` a fresh interpreter has imported once it has run the code."""
    code += f"\nimport sys; print(sorted(set({heavy!r}) & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return out.strip().splitlines()[-1]


def test_help_imports_nothing_heavy():
    code = "import hacrl.cli.main as m\ntry: m.app(['--help'])\nexcept SystemExit: pass"
    assert heavy_modules_after(code) == "[]"
    assert heavy_modules_after("import numpy") == "['numpy']"  # the measure can tell


def test_checking_and_starting_a_run_does_not_import_torchs_compiler():
    """It takes as long to import as torch itself. Compiled layers import it."""
    slow = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.fsdp")
    assert heavy_modules_after("import hacrl.runs.dry_run, hacrl.runs.run", slow) == "[]"


def test_reading_a_config_imports_nothing_heavy():
    code = "from pathlib import Path\nfrom hacrl.config.load import load_config\nload_config(Path('demo'))"
    assert heavy_modules_after(code) == "[]"
