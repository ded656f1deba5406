"""The fixture of whole runs."""

from tests.training.runs import runs

__all__ = ["runs"]
