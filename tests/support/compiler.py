"""Another compiler in place of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hacrl.models import compile as compiled


def use_compiler(monkeypatch: pytest.MonkeyPatch, compiler: Callable[..., Any]) -> None:
    """For all that is compiled from now on, until the test is over."""
    monkeypatch.setattr(compiled.torch, "compile", compiler)
    monkeypatch.setattr(compiled, "_COMPILED_FUNCTIONS", {})
