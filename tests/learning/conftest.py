"""The fixture of whole runs."""

from tests.learning.runs import runs

__all__ = ["runs"]
