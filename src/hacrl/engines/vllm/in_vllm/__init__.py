"""Runs inside vLLM's workers, perhaps in another environment: nothing here may import hacrl."""
