"""Turn a run's reports into named numbers, with the same names in every tracker.

=============================  =====================================================
``qwen/reward``                mean reward of an agent's rollouts of a step
``qwen/verdicts/timeout``      number of rollouts with this verdict
``qwen/rewards/brief/mean``    one reward function's values
``qwen/logged/words``          what a reward function gave to ``log_metric``
``qwen/episodes/turns``        of episodes with an environment
``qwen/learning/loss``         the agent's updates
``qwen/from/llama/clipped``    training on llama's rollouts; ``from/qwen``: on its own
``qwen/accuracy``              on held-out problems
``seconds/rollout/qwen``       time of a phase
=============================  =====================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args

from hacrl.plain_text import printable
from hacrl.training.episode_metrics import EpisodesReport
from hacrl.training.metrics import Accuracy, AgentReport, AsynchronousReport, LearnReport, StepReport
from hacrl.types import EpisodeEnd, VerdictLabel

Scalars = dict[str, float]


def step_scalars(report: StepReport, seconds: Mapping[str, float]) -> Scalars:
    """Return every number of a step."""
    scalars: Scalars = {}
    for name, agent in report.agents.items():
        scalars.update(_agent_scalars(name, agent))
    scalars.update({f"seconds/{phase}": value for phase, value in seconds.items()})
    return scalars


def evaluation_scalars(accuracies: Mapping[str, Accuracy]) -> Scalars:
    """Return every agent's accuracy and its standard error."""
    scalars: Scalars = {}
    for name, accuracy in accuracies.items():
        scalars[f"{name}/accuracy"] = accuracy.mean
        scalars[f"{name}/accuracy_stderr"] = accuracy.stderr
    return scalars


def _agent_scalars(name: str, report: AgentReport) -> Scalars:
    scalars = _numbers(name, report) | _numbers(name, report.rollout)
    # A verdict that did not occur is logged as zero, so that its curve has no gaps.
    for label in get_args(VerdictLabel):
        scalars[f"{name}/verdicts/{label}"] = float(report.rollout.verdicts.get(label, 0))
    for function, rewards in report.rollout.rewards.items():
        scalars |= _numbers(f"{name}/rewards/{_part(function)}", rewards)
    scalars |= {f"{name}/logged/{_part(key)}": value for key, value in report.rollout.logged.items()}
    if report.rollout.episodes is not None:
        scalars |= _episode_scalars(f"{name}/episodes", report.rollout.episodes)
    if report.engine is not None:
        scalars |= _numbers(f"{name}/engine", report.engine)
    scalars |= {
        f"{name}/from/{source}/capability_ratio": ratio for source, ratio in report.capability_ratios.items()
    }
    if report.asynchronous is not None:
        scalars |= _asynchronous_scalars(name, report.asynchronous)
    return scalars | _numbers(f"{name}/learning", report.learning) | _source_scalars(name, report.learning)


def _episode_scalars(prefix: str, report: EpisodesReport) -> Scalars:
    scalars = _numbers(prefix, report)
    for end in get_args(EpisodeEnd):  # zero for ends that did not occur, as with verdicts
        scalars[f"{prefix}/ends/{end}"] = float(report.ends.get(end, 0))
    return scalars


def _asynchronous_scalars(name: str, report: AsynchronousReport) -> Scalars:
    scalars = _numbers(f"{name}/asynchronous", report)
    for source, staleness in report.staleness.items():
        scalars |= _numbers(f"{name}/from/{source}/staleness", staleness)
    for what, counts in (("missing", report.missing), ("late", report.late), ("too_late", report.too_late)):
        scalars |= {f"{name}/from/{source}/{what}": float(count) for source, count in counts.items()}
    return scalars


def _source_scalars(name: str, report: LearnReport) -> Scalars:
    scalars: Scalars = {}
    for source, used in report.sources.items():
        scalars |= _numbers(f"{name}/from/{source}", used)
    for source, retokenised in report.retokenised.items():
        scalars |= _numbers(f"{name}/from/{source}/retokenised", retokenised)
    for source, reasons in report.dropped.items():
        scalars |= {f"{name}/from/{source}/dropped/{reason}": float(n) for reason, n in reasons.items()}
    scalars |= {f"{name}/from/{source}/left_out": float(n) for source, n in report.left_out.items()}
    scalars |= {f"{name}/from/{source}/alignment": cosine for source, cosine in report.alignment.items()}
    scalars |= {f"{name}/from/{source}/trusted": float(trusted) for source, trusted in report.trusted.items()}
    return scalars


def _numbers(prefix: str, record: Any) -> Scalars:
    """Return all fields of a record that are numbers."""
    return {f"{prefix}/{key}": float(value) for key, value in _fields(record) if _is_number(value)}


def _part(name: str) -> str:
    """Return a name of the user's as trackers accept it."""
    return re.sub(r"[^\w. :/-]", "_", printable(name))


def _fields(record: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(record):
        yield field.name, getattr(record, field.name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
