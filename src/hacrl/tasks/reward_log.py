"""What reward functions log with ``log_metric`` and ``log_extra``, the two functions that TRL gives them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hacrl.json_values import is_plain_json
from hacrl.tasks.verdicts import as_number


class RewardLog:
    """Collects what the reward functions log while they judge one batch of responses.

    Wrong arguments raise ValueError in the function that called, so that the error names its line.
    """

    def __init__(self, responses: int) -> None:
        self._responses = responses
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """What a reward function may take as arguments."""
        return {"log_metric": self.metric, "log_extra": self.extra}

    @property
    def metrics(self) -> Mapping[str, float]:
        """Name -> mean of the finite values that were logged under it."""
        return {name: math.fsum(values) / len(values) for name, values in sorted(self._metrics.items())}

    def columns_of(self, response: int) -> dict[str, Any]:
        """Return column -> the response's value."""
        return {name: values[response] for name, values in sorted(self._columns.items())}

    def metric(self, name: str, value: float) -> None:
        """Log one number of this batch; values under one name are averaged, those not finite left out."""
        number = as_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}, ...): the value must be a number, not {value!r:.100}")
        if math.isfinite(number):
            self._metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values: Iterable[Any]) -> None:
        """Log a further column of the table of rollouts, with one value per response."""
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise ValueError(
                f"log_extra({column!r}, ...): give a list with one value per completion, not "
                f"{type(values).__name__}"
            )
        listed = [_as_json(value) for value in values]
        if len(listed) != self._responses:
            raise ValueError(
                f"log_extra({column!r}, ...): {len(listed)} values for {self._responses} completions; give "
                "one each"
            )
        self._columns[str(column)] = listed


def _as_json(value: Any) -> Any:
    """Return what the rollout log can hold: plain JSON as it is, a number as a float, the rest as text."""
    if is_plain_json(value):
        return value
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else str(value)
