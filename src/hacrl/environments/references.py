"""Find out how another process can import a factory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

_MAIN = ("__main__", "__mp_main__")


def reference_of(factory: Callable[..., Any]) -> str | None:
    """Return ``module:name`` or ``file.py:name`` by which another process can import a factory.

    Return None for a lambda, a closure, and whatever a notebook or the user's script defines: importing the
    script would run it again.
    """
    module_name = getattr(factory, "__module__", None)
    name = getattr(factory, "__qualname__", None)
    module = sys.modules.get(module_name or "")
    if module is None or not module_name or not name or module_name in _MAIN:
        return None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)  # "<locals>" and "<lambda>" are no attributes
    if found is not factory:
        return None
    file = getattr(module, "__file__", None)
    if file is not None and module_name.startswith("hacrl_plugin_"):  # hacrl.plugins loaded the file
        return f"{file}:{name}"
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # a module without a spec was made by hand
        return None
    return None if spec is None or spec.origin is None else f"{module_name}:{name}"
