"""Commands that take ``KEY=VALUE``: tell a user who writes ``--lr 1e-5`` to write ``lr=1e-5``."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from typer.core import TyperCommand

from hacrl.config.trl_names import CONFIG_NAMES, EARLIER_NAMES


class OverrideCommand(TyperCommand):
    """A command whose recipe is changed by ``KEY=VALUE`` arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option that the command does not have with the argument to write instead."""
        known = {option for parameter in self.params for option in parameter.opts} | {"--help", "--"}
        for i, given in enumerate(args):
            if given == "--":
                break
            option = given.partition("=")[0]
            if not option.startswith("--") or option in known:
                continue
            if not get_close_matches(
                option.replace("_", "-"), known, n=1, cutoff=0.7
            ):  # else the parser asks
                ctx.fail(
                    f"there is no option {option}. Keys of a recipe are written without dashes: "
                    f"{as_override(given, args[i + 1 :])}"
                )
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def as_override(option: str, rest: Sequence[str]) -> str:
    """Return ``KEY=VALUE`` for an option such as ``--lr=1e-5``, or ``--lr`` with the arguments after it."""
    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    row = CONFIG_NAMES.get(name) or EARLIER_NAMES.get(name)
    key = name if row is None or row.kind == "absent" else row.here
    if not value and rest and not rest[0].startswith("--") and "=" not in rest[0]:
        value = rest[0]
    return f"{key}={value or '...'}"
