"""How old the policies are that sampled what a learner learns from.

A response that learner k trains on in step b was sampled by the policies of its source j: token t by the
policy that j had after step s(t) and U(t) updates. In a synchronous run s(t) = b - 1 for all tokens. The
token's staleness is

    b - 1 - s(t)                in steps
    U_j(b - 1) - U(t)           in policy versions, which are updates

with U_j(n) the updates that j has made after step n. Own tokens (j = k) are at most S =
``asynchronous.max_staleness`` steps old, and so are the tokens of other agents that were there in time.
Rollouts that come late are refused if any of their tokens is older.

If a step makes no update, the policies before and after it are the same, and s(t) is the later step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hacrl.types import VerifiedRollout

VersionTokens = dict[int, int]  # policy version -> tokens that it sampled


@dataclass(frozen=True)
class Staleness:
    """Staleness of the tokens that one learner gets from one source in one step."""

    steps_mean: float
    steps_max: int
    versions_mean: float
    versions_max: int


class VersionHistory:
    """The policy version of one agent after each of its steps; step 0 is before training."""

    def __init__(self, versions: Sequence[int]) -> None:
        self._versions = list(versions)

    def finish_step(self, updates: int) -> None:
        """Record that the agent has finished a further step with so many updates."""
        self._versions.append(self._versions[-1] + updates)

    @property
    def steps(self) -> int:
        """Steps that the agent has finished."""
        return len(self._versions) - 1

    def version_after(self, step: int) -> int:
        """Return the version after a step, or the newest one if the agent is not that far."""
        return self._versions[min(step, self.steps)]

    def step_of(self, version: int, most: int) -> int:
        """Return the last step, ``most`` at most, after which the agent had this version or an older one."""
        return max(0, min(most, bisect_right(self._versions, version) - 1))

    def as_json(self) -> list[int]:
        """Return the versions after steps 0, 1, ..."""
        return list(self._versions)


def tokens_by_version(rollouts: Iterable[VerifiedRollout]) -> VersionTokens:
    """Return how many tokens each policy version has sampled."""
    tokens: VersionTokens = {}
    for verified in rollouts:
        for version, count in verified.rollout.versions:
            tokens[version] = tokens.get(version, 0) + count
    return dict(sorted(tokens.items()))


def staleness(tokens: VersionTokens, source: VersionHistory, step: int) -> Staleness | None:
    """Return the staleness in a learner's step of tokens from one source; None if there are none."""
    count = sum(tokens.values())
    if not count:
        return None
    now = source.version_after(step - 1)
    steps = {version: step - 1 - source.step_of(version, step - 1) for version in tokens}
    versions = {version: max(0, now - version) for version in tokens}
    return Staleness(
        steps_mean=sum(tokens[version] * steps[version] for version in tokens) / count,
        steps_max=max(steps.values()),
        versions_mean=sum(tokens[version] * versions[version] for version in tokens) / count,
        versions_max=max(versions.values()),
    )


UNKNOWN_VERSION = -1  # of a policy that was lost: no policy has this version


def with_unknown_versions(verified: VerifiedRollout) -> VerifiedRollout:
    """Return the rollout as one that no present or future version of the policy has sampled."""
    rollout = verified.rollout
    segments = tuple(replace(segment, versions=()) for segment in rollout.segments)
    return replace(verified, rollout=replace(rollout, segments=segments, policy_version=UNKNOWN_VERSION))
