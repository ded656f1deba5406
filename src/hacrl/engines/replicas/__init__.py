"""Several copies of an agent's model, each in a process of its own, that generate its responses together."""
