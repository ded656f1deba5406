"""What one learner made of each rollout of a step: the record that the rollout log keeps."""

from __future__ import annotations

from hacrl.training.learn_stats import FirstUse, LearnStats
from hacrl.training.samples import LearnerSamples
from hacrl.types import Fate, LearnerSample, LearntRollout


def learnt_rollouts(learner: str, stats: LearnStats, samples: LearnerSamples) -> tuple[LearntRollout, ...]:
    """Return a record of every rollout that the learner could have trained on, samples first."""
    uses = stats.first_uses
    trained = [_learnt(learner, sample, uses.get(sample.rollout_key)) for sample in samples.samples]
    return (*trained, *samples.not_used)


def _learnt(learner: str, sample: LearnerSample, use: FirstUse | None) -> LearntRollout:
    is_retokenised = sample.behaviour_logprobs is None
    return LearntRollout(
        learner=learner,
        agent=sample.source,
        problem=sample.problem,
        sample=sample.index,
        fate=_fate(sample, use),
        advantage=sample.advantage,
        ratio=None if use is None else use.numbers.ratio,
        clipped=None if use is None else use.numbers.clipped,
        weight=None if use is None else use.numbers.gradient,
        token_ids=sample.response_ids if is_retokenised else None,
        token_logprobs=None if use is None else use.token_logprobs,
        loss_mask=None if all(sample.loss_mask) else sample.loss_mask,
        late_from=sample.step,
    )


def _fate(sample: LearnerSample, use: FirstUse | None) -> Fate:
    if sample.is_probe:
        return "not_shared"
    if use is None:  # samples without advantage are not run; any other was in an update that was left out
        return "no_signal" if sample.advantage == 0 else "bad_update"
    if use.numbers.clipped < 1:
        return "used"
    return "clipped_above" if use.numbers.clipped_above > use.numbers.clipped_below else "clipped_below"
