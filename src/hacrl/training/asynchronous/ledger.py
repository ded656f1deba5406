"""What all agents have answered and learnt in an asynchronous run, and what each learner gets from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hacrl.engines.base import SyncReport
from hacrl.rollouts.groups import PromptGroup, group_by_prompt, rewards_that_count
from hacrl.rollouts.records import from_json, to_json
from hacrl.training.asynchronous.late import LateRollouts
from hacrl.training.asynchronous.schedule import Job
from hacrl.training.asynchronous.staleness import (
    VersionHistory,
    VersionTokens,
    staleness,
    tokens_by_version,
    with_unknown_versions,
)
from hacrl.training.metrics import Accuracy, AgentReport, AsynchronousReport
from hacrl.types import VerifiedRollout


@dataclass(frozen=True)
class Lesson:
    """What one learner gets in one step."""

    groups: list[PromptGroup]
    report: AsynchronousReport  # without staleness, see Ledger.finish_step


class Ledger:
    """Keeps the rollouts that a learner may still need, every agent's policy versions, and reports.

    ``names`` are in the config's order; ``versions`` are the agents' policy versions before training.
    """

    def __init__(self, names: Sequence[str], versions: Mapping[str, int], max_staleness: int) -> None:
        self.rollouts: dict[int, dict[str, list[VerifiedRollout]]] = {}  # batch -> agent -> rollouts
        self.syncs: dict[int, dict[str, SyncReport]] = {}  # of the weights that sampled a batch last
        self.reports: dict[int, dict[str, AgentReport]] = {}  # of steps that some agent has not finished
        # step -> learner -> source: what the learner got
        self._tokens: dict[int, dict[str, dict[str, VersionTokens]]] = {}
        self.accuracies: dict[int, dict[str, Accuracy]] = {}  # of evaluations that are not finished
        self.histories = {name: VersionHistory([versions[name]]) for name in names}
        self.late = LateRollouts(max_staleness)
        self._names = list(names)
        self._max_staleness = max_staleness
        self._of_lost_policies: set[tuple[int, str]] = set()  # batch and agent

    def add(self, batch: int, agent: str, rollouts: list[VerifiedRollout]) -> None:
        """Keep an agent's rollouts of a batch."""
        self.rollouts.setdefault(batch, {})[agent] = rollouts

    def add_logged(self, batch: int, agent: str, rollouts: list[VerifiedRollout]) -> None:
        """Keep rollouts that an earlier process has sampled.

        Their sampler's policy may have been lost with that process: versions after the restored one were
        other weights than those that will get the same number. Such tokens are never compared with the
        learner's; their recorded log-probabilities stay what they were sampled with.
        """
        self.add(batch, agent, rollouts)
        restored = self.histories[agent].version_after(self.histories[agent].steps)
        if any(verified.rollout.newest_version > restored for verified in rollouts):
            self._of_lost_policies.add((batch, agent))

    def lesson(self, job: Job, expected: Mapping[str, int]) -> Lesson:
        """Return what a learner gets in its step; remember what it does not wait for.

        ``expected``: rollouts of each agent in a batch.
        """
        learner, step = job.agent, job.step
        present = self._present(step, learner)
        teaching, dropped = self.late.take(learner, step, lambda *late: self._is_fresh(step, *late))
        self.late.leave_out(learner, step, sorted(job.without))
        groups = group_by_prompt(present)
        for batch, sources in teaching.items():
            whole = group_by_prompt(self._present(batch, learner))
            groups += [replace(group, teachers=tuple(sources), step=batch) for group in whole]
        self._tokens.setdefault(step, {})[learner] = self._tokens_of(step, teaching)
        report = AsynchronousReport(
            mixed=_share_mixed(self.rollouts[step][learner]),
            missing={name: expected[name] for name in sorted(job.without)},
            late=_counted(teaching, expected),
            too_late=_counted(dropped, expected),
        )
        return Lesson(groups, report)

    def _present(self, batch: int, learner: str) -> dict[str, list[VerifiedRollout]]:
        """Return the batch's rollouts in the config's order, as the learner trains on them."""
        found = self.rollouts[batch]
        present = {name: found[name] for name in self._names if name in found}
        if (batch, learner) in self._of_lost_policies:
            present[learner] = [with_unknown_versions(verified) for verified in present[learner]]
        return present

    def _is_fresh(self, step: int, batch: int, source: str) -> bool | None:
        rollouts = self.rollouts.get(batch, {}).get(source)
        if rollouts is None:
            return None
        found = staleness(tokens_by_version(rollouts), self.histories[source], step)
        return found is not None and found.steps_max <= self._max_staleness

    def _tokens_of(self, step: int, teaching: Mapping[int, Sequence[str]]) -> dict[str, VersionTokens]:
        """Return the tokens of each source that teach in a step, late ones included."""
        found = {}
        for name in self._names:
            late = [batch for batch, sources in teaching.items() if name in sources]
            taught = [r for batch in (step, *late) for r in self.rollouts[batch].get(name, ())]
            found[name] = tokens_by_version(taught)
        return found

    def finish_step(self, step: int) -> dict[str, AgentReport]:
        """Return the reports of a step that all agents have finished, in the config's order.

        Now every source has made step - 1, so it is known how many updates its tokens are old.
        """
        reports, tokens = self.reports.pop(step), self._tokens.pop(step)
        finished = {}
        for name in [name for name in self._names if name in reports]:
            report = reports[name].asynchronous
            assert report is not None
            found = {
                source: value
                for source, counts in tokens[name].items()
                if (value := staleness(counts, self.histories[source], step)) is not None
            }
            finished[name] = replace(reports[name], asynchronous=replace(report, staleness=found))
        return finished

    def forget(self, steps_done: int) -> None:
        """Forget rollouts of steps that all agents have finished, unless they may teach later."""
        oldest_late = self.late.oldest_batch()
        first = steps_done + 1 if oldest_late is None else min(steps_done + 1, oldest_late)
        for batch in [batch for batch in self.rollouts if batch < first]:
            del self.rollouts[batch]
        for batch in [batch for batch in self.syncs if batch <= steps_done]:
            del self.syncs[batch]
        self._of_lost_policies = {key for key in self._of_lost_policies if key[0] >= first}

    def as_json(self) -> dict[str, Any]:
        """Return all but the rollouts, which are in the log, as plain values."""
        return {
            "versions": {name: history.as_json() for name, history in self.histories.items()},
            "late": self.late.as_json(),
            "tokens": {
                str(step): {
                    learner: {source: list(map(list, counts.items())) for source, counts in sources.items()}
                    for learner, sources in learners.items()
                }
                for step, learners in self._tokens.items()
            },
            "reports": {str(step): _all_to_json(found) for step, found in self.reports.items()},
            "accuracies": {str(step): _all_to_json(found) for step, found in self.accuracies.items()},
        }

    def load_json(self, data: Mapping[str, Any]) -> None:
        """Restore what :meth:`as_json` returned."""
        self.histories = {name: VersionHistory(data["versions"][name]) for name in self._names}
        self.late.load_json(data["late"])
        self._tokens = {
            int(step): {
                learner: {source: dict(counts) for source, counts in sources.items()}
                for learner, sources in learners.items()
            }
            for step, learners in data["tokens"].items()
        }
        self.reports = {
            int(step): {name: from_json(AgentReport, report) for name, report in found.items()}
            for step, found in data["reports"].items()
        }
        self.accuracies = {
            int(step): {name: from_json(Accuracy, accuracy) for name, accuracy in found.items()}
            for step, found in data["accuracies"].items()
        }


def rewards_of(rollouts: Mapping[str, Sequence[VerifiedRollout]]) -> dict[str, list[float]]:
    """Return agent -> the rewards of its rollouts that count; only agents that have some."""
    rewards = {name: rewards_that_count(found) for name, found in rollouts.items()}
    return {name: found for name, found in rewards.items() if found}


def _share_mixed(rollouts: Sequence[VerifiedRollout]) -> float:
    mixed = sum(len(verified.rollout.versions) > 1 for verified in rollouts)
    return mixed / len(rollouts) if rollouts else 0.0


def _counted(batches: Mapping[int, Sequence[str]], expected: Mapping[str, int]) -> dict[str, int]:
    """Return source -> rollouts of all these batches."""
    counts: dict[str, int] = {}
    for sources in batches.values():
        for source in sources:
            counts[source] = counts.get(source, 0) + expected[source]
    return dict(sorted(counts.items()))


def _all_to_json(records: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_json(record) for name, record in records.items()}
