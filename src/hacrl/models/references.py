"""What a model reference stands for: a bundled agent, SmolLM2, a folder or a hub id. Needs no torch."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from hacrl.errors import ModelError
from hacrl.models import smollm2

BUNDLED_PREFIX = "bundled:"


def bundled_agents() -> dict[str, Path]:
    """Name and folder of each bundled agent."""
    root = Path(str(files("hacrl.models") / "bundled"))
    return {folder.name: folder for folder in sorted(root.iterdir()) if (folder / "config.json").is_file()}


def resolve_model(reference: str) -> str:
    """The folder or hub id a reference stands for; a missing folder or bundled name is an error here.

    Cheap. SmolLM2's folder need not be there yet: :func:`materialise_model` makes it.
    """
    if reference == smollm2.REFERENCE:
        return str(smollm2.find_smollm2())
    if reference.startswith(BUNDLED_PREFIX):
        bundled = bundled_agents()
        name = reference.removeprefix(BUNDLED_PREFIX)
        if name not in bundled:
            raise ModelError(f"model: there is no bundled agent {name!r}; there are {', '.join(bundled)}")
        return str(bundled[name])
    path = Path(os.path.expanduser(reference))  # unlike Path's own: no error where there is no such user
    if not reference.strip():
        raise ModelError(
            f"model: {reference!r} names nothing; give a folder, a Hugging Face id or bundled:NAME"
        )
    if os.path.isfile(path):  # unlike Path's own: no error for a name that is too long
        raise ModelError(
            f"model: {reference} is a file; give the folder that has config.json and the weights"
        )
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise ModelError(f"model: folder {reference} has no config.json: is it a Hugging Face folder?")
        return str(path)
    if reference.startswith((".", "/", "~")) or reference.count("/") > 1:
        raise ModelError(f"model: folder {reference} does not exist")
    return reference


def materialise_model(reference: str) -> str:
    """As :func:`resolve_model`, with the files in place: what to load from."""
    if reference == smollm2.REFERENCE:
        return str(smollm2.materialise_smollm2())
    return resolve_model(reference)
