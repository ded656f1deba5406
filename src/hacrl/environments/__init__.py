"""Environments: episodes in processes that can be killed, with limits, many at once."""
