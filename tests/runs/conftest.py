"""The fixture of two agents without weights."""

from tests.runs.long_prompts import models

__all__ = ["models"]
