"""How long a call may run, and what its failure says."""

from __future__ import annotations

from hacrl.environments.interface import EnvironmentLimits


def call_limit(limits: EnvironmentLimits, used: float) -> float:
    """Return the seconds that the next call may take. ``used``: what earlier calls of the episode took."""
    if limits.episode_seconds is None:
        return limits.call_seconds
    return min(limits.call_seconds, max(0.0, limits.episode_seconds - used))


def time_failure(limits: EnvironmentLimits, used: float) -> str:
    """Return why a call that took longer than :func:`call_limit` failed."""
    if limits.episode_seconds is not None and call_limit(limits, used) < limits.call_seconds:
        return f"took more than {limits.episode_seconds:g} s in all (the limit is episode_seconds)"
    return f"did not answer within {limits.call_seconds:g} s (the limit is call_seconds)"
