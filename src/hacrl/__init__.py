"""hacrl: train several different LLMs together, so that every verified rollout teaches all of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.api.callback import Callback
    from hacrl.api.config import HACRLConfig
    from hacrl.api.trainer import HACRLTrainer
    from hacrl.config.schema import AgentSettings
    from hacrl.types import Problem, Rollout, Verdict

__version__ = "0.1.0"
__all__ = ["AgentSettings", "Callback", "HACRLConfig", "HACRLTrainer", "Problem", "Rollout", "Verdict"]

# Name -> module that defines it. Modules are imported on first use, so that ``import hacrl`` stays light.
_MODULES = {
    "AgentSettings": "hacrl.config.schema",
    "Callback": "hacrl.api.callback",
    "HACRLConfig": "hacrl.api.config",
    "HACRLTrainer": "hacrl.api.trainer",
    "Problem": "hacrl.types",
    "Rollout": "hacrl.types",
    "Verdict": "hacrl.types",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
