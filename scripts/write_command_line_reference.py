"""Write docs/command_line.md from the commands in src/hacrl/cli/.

python scripts/write_command_line_reference.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import typer

from hacrl.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "command_line.md"

_HEAD = """# Command line

The commands of `hacrl`, as `--help` explains them. `KEY=VALUE` sets any key of the
[configuration](configuration.md). The [exit code](reliability.md#signals-and-exit-codes) tells a script how a
command ended.

`scripts/write_command_line_reference.py` writes this page from `src/hacrl/cli/`.
"""


def command_line_page() -> str:
    """Return ``docs/command_line.md``: a section for each command."""
    group: Any = typer.main.get_command(app)
    lines = [_HEAD]
    for name, command in group.commands.items():
        lines += [f"## `hacrl {name}`", "", inspect.cleandoc(command.help), ""]
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        lines += ["```text", " ".join(["hacrl", name, *map(_usage, arguments), "[OPTIONS]"]), "```", ""]
        if command.params:
            lines += ["| argument or option | default | meaning |", "|---|---|---|"]
            lines += [_row(parameter) for parameter in command.params] + [""]
    return "\n".join(lines)


def _usage(argument: Any) -> str:
    text = argument.metavar or argument.name.upper()
    text += "..." if argument.nargs == -1 else ""
    return text if argument.required else f"[{text}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        name = parameter.opts[0] + value
    default = "required" if parameter.required else ""
    if not parameter.required and not getattr(parameter, "is_flag", False) and parameter.default is not None:
        default = f"`{parameter.default}`"
    meaning = " ".join(parameter.help.split()).replace("|", "\\|")
    return f"| `{name}` | {default} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(command_line_page(), encoding="utf-8")
