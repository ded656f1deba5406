"""The base class of all settings records."""

from __future__ import annotations

from typing import Any, ClassVar


class Settings:
    """Base of every settings record: a frozen dataclass whose unknown keys are refused.

    The string literal under a field says what the field means, in which unit, and how its default is chosen.
    ``docs/configuration.md`` is written from these texts (:mod:`hacrl.config.reference`).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # pydantic reads it when it validates
