"""Resolve a ``model`` setting: a bundled agent, SmolLM2, a folder or a Hugging Face id. Needs no torch."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from hacrl.errors import ModelError
from hacrl.models import smollm2

BUNDLED_PREFIX = "bundled:"


def bundled_agents() -> dict[str, Path]:
    """Return the folder of each bundled agent by name."""
    root = Path(str(files("hacrl.models") / "bundled"))
    return {folder.name: folder for folder in sorted(root.iterdir()) if (folder / "config.json").is_file()}


def resolve_model(reference: str) -> str:
    """Return the folder or Hugging Face id. Raise ModelError for a missing folder or bundled agent.

    This function is cheap. It does not create SmolLM2's folder; :func:`materialise_model` does.
    """
    if reference == smollm2.REFERENCE:
        return str(smollm2.find_smollm2())
    if reference.startswith(BUNDLED_PREFIX):
        bundled = bundled_agents()
        name = reference.removeprefix(BUNDLED_PREFIX)
        if name not in bundled:
            raise ModelError(f"model: there is no bundled agent {name!r}; there are {', '.join(bundled)}")
        return str(bundled[name])
    path = Path(os.path.expanduser(reference))  # Path.expanduser raises for an unknown user
    if not reference.strip():
        raise ModelError(
            f"model: {reference!r} names nothing; give a folder, a Hugging Face id or bundled:NAME"
        )
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
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
    """Return what :func:`resolve_model` returns, after creating SmolLM2's folder if it is needed."""
    if reference == smollm2.REFERENCE:
        return str(smollm2.materialise_smollm2())
    return resolve_model(reference)
