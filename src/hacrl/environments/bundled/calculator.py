"""A calculator as a tool, and word problems like those of GSM8K for it."""

from __future__ import annotations

from hacrl.environments.bundled.answers import OneAnswer
from hacrl.environments.bundled.expressions import ExpressionError, calculate


class Calculator(OneAnswer):
    """Tools ``calculate`` and ``submit``; reward 1 if the submitted number equals the row's answer."""

    def calculate(self, expression: str) -> str:
        """Compute the value of an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses, for example (12 + 3.5) * 4.

        Returns:
            The value as a decimal number.
        """
        try:
            return calculate(str(expression))
        except ExpressionError as error:
            return f"Error: {error}"
