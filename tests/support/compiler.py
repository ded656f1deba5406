"""Replace torch.compile in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hacrl.models import compile as compiled


def use_compiler(monkeypatch: pytest.MonkeyPatch, compiler: Callable[..., Any]) -> None:
    """Use this compiler for everything that is compiled until the test ends."""
    monkeypatch.setattr(compiled.torch, "compile", compiler)
    monkeypatch.setattr(compiled, "_COMPILED_FUNCTIONS", {})
