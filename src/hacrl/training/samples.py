"""Turn all agents' verified rollouts of a step into one learner's samples.

With n agents and G responses each, every learner has n * G responses per prompt, so learning costs n^2 in
all. ``max_cross_rollouts`` limits how many responses of other agents a learner trains on, which keeps the
cost linear in n. Responses over the limit are left out of the loss only: baselines and capabilities use
every reward. The same holds for responses that the length limit cut, with ``mask_truncated``.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hacrl.algorithms.advantage import CapabilityRatio
from hacrl.algorithms.context import StepContext
from hacrl.algorithms.methods import Method
from hacrl.algorithms.overlong import overlong_penalty
from hacrl.models.agent import Agent
from hacrl.models.retokenizing import DropReason, LearnerTokens, Retokeniser
from hacrl.rollouts.groups import PromptGroup
from hacrl.seeding import derive_seed
from hacrl.types import Fate, LearnerSample, LearntRollout, Rollout


@dataclass
class LearnerSamples:
    """The samples of one step, and how many rollouts did not become one."""

    samples: list[LearnerSample] = field(default_factory=list)
    dropped: Counter[tuple[str, DropReason]] = field(default_factory=Counter)  # by source and reason
    # by source: learner's tokens per source token, of each retokenised response
    length_ratios: dict[str, list[float]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)  # by source: over max_cross_rollouts
    not_used: list[LearntRollout] = field(default_factory=list)  # those that did not become a sample
    baselines: list[float] = field(default_factory=list)  # mu of the learner, of each prompt
    # of each prompt: whether some response has an advantage that is not zero
    has_signal: list[bool] = field(default_factory=list)
    trusted: frozenset[str] = frozenset()  # partners that the learner trusts, where the method asks for trust
    is_stronger: dict[str, bool] = field(default_factory=dict)  # by partner: more capable than the learner

    def add(self, sample: LearnerSample) -> None:
        """Append a sample, and record its length ratio if it was retokenised."""
        self.samples.append(sample)
        if sample.behaviour_logprobs is None:
            ratio_of_lengths = sample.loss_tokens / sample.source_length
            self.length_ratios.setdefault(sample.source, []).append(ratio_of_lengths)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One response to one prompt, which a learner may train on."""

    source: str
    index: int  # among the source's responses to the prompt
    reward: float
    advantage: float  # for this learner
    step: int | None = None  # that the response was sampled for; None: the step that is learnt
    is_probe: bool = False  # of a partner that is not trusted: its gradient is measured only


@dataclass
class _PromptState:
    """The responses to one prompt while samples are made from them."""

    group: PromptGroup
    to_try: list[Candidate]
    reserves: list[Candidate]  # of other agents, over the limit; the next one replaces a dropped response
    has_signal: bool  # some advantage is not zero
    not_shared: list[Candidate]  # left out by the method's rule
    failed: list[Candidate]  # episodes whose environment failed
    samples: dict[tuple[str, int], LearnerSample] = field(default_factory=dict)  # by source and index

    def without_sample(self, learner: str, candidate: Candidate, reason: Fate) -> LearntRollout:
        """Return the record of a response that the learner does not train on."""
        source, index = candidate.source, candidate.index
        return LearntRollout(
            learner,
            source,
            self.group.problem.id,
            index,
            reason,
            candidate.advantage,
            late_from=self.group.step,
        )

    def rollout(self, candidate: Candidate) -> Rollout:
        return self.group.responses[candidate.source][candidate.index].rollout

    def add(self, candidate: Candidate, sample: LearnerSample | DropReason, is_own: bool) -> None:
        """Store the sample. If another agent's response was dropped, try the next reserve instead."""
        if isinstance(sample, LearnerSample):
            self.samples[candidate.source, candidate.index] = sample
        elif not is_own and not candidate.is_probe and self.reserves:
            self.to_try.append(self.reserves.pop(0))


class SampleBuilder:
    """Builds one learner's samples.

    ``max_cross_rollouts``: the most responses of other agents per prompt; None: no limit. Builders with the
    same ``retokeniser`` share its work. ``mask_truncated``: drop responses that did not end by themselves.
    ``overlong``: longest response and buffer of the soft overlong punishment. ``probe_share``: share of the
    prompts on which the gradients of partners that are not trusted are measured.
    """

    def __init__(
        self,
        learner: Agent,
        method: Method,
        learn_stop_token: bool = True,
        max_cross_rollouts: int | None = None,
        retokeniser: Retokeniser | None = None,
        *,
        mask_truncated: bool = False,
        overlong: tuple[int, int] = (0, 0),
        probe_share: float = 0.5,
    ) -> None:
        self._learner = learner
        self._method = method
        self._learn_stop_token = learn_stop_token
        self._max_cross_rollouts = max_cross_rollouts
        self._retokeniser = retokeniser or Retokeniser()
        self._mask_truncated = mask_truncated
        self._overlong = overlong
        self._probe_share = probe_share
        self._shares_rollouts = method.settings.shares_rollouts
        self._needs_logprobs = method.settings.needs_source_logprobs

    def build(
        self,
        groups: Sequence[PromptGroup],
        ratio: CapabilityRatio,
        seed: int = 0,
        context: StepContext = StepContext(),  # noqa: B008 - immutable
    ) -> LearnerSamples:
        """Return all samples of a step, prompt by prompt.

        Advantages compare all rollouts, dropped ones included. Within a prompt, sources are sorted by name,
        so mini-batches do not depend on the order of agents. ``seed`` decides between equally useful
        responses if there is a limit. ``context``: what else the method may know of the step.
        """
        own_capability = context.capabilities.get(self._learner.name, 0.0)
        built = LearnerSamples(
            trusted=context.trusted,
            is_stronger={name: value > own_capability for name, value in context.capabilities.items()},
        )
        method, trust = self._method.at(context), self._method.settings.trust_window is not None
        self._retokeniser.start_step(groups)
        probed = math.ceil(len(groups) * self._probe_share)
        prompts = [
            self._prompt_state(
                group, method, ratio, seed, context.trusted if trust else None, number < probed
            )
            for number, group in enumerate(groups)
        ]
        while attempts := [(prompt, candidate) for prompt in prompts for candidate in prompt.to_try]:
            for prompt in prompts:
                prompt.to_try = []
            rollouts = [(prompt.rollout(candidate), candidate) for prompt, candidate in attempts]
            samples = self._samples(rollouts)
            for (prompt, candidate), sample in zip(attempts, samples, strict=True):
                prompt.add(candidate, sample, is_own=candidate.source == self._learner.name)
                if not isinstance(sample, LearnerSample):
                    built.dropped[candidate.source, sample] += 1
                    built.not_used.append(prompt.without_sample(self._learner.name, candidate, sample))
        if method.baseline is not None:
            compared = [
                compared_rewards(group, self._overlong)
                for group in groups
                if group.teaches(self._learner.name)
            ]
            built.baselines = [
                method.baseline(rewards, self._learner.name, ratio)
                for rewards in compared
                if self._learner.name in rewards
            ]
        built.has_signal = [prompt.has_signal for prompt in prompts]
        for prompt in prompts:
            for key in sorted(prompt.samples):
                built.add(prompt.samples[key])
            built.left_out.update(candidate.source for candidate in prompt.reserves)
            built.not_used += [
                prompt.without_sample(self._learner.name, candidate, "over_limit")
                for candidate in prompt.reserves
            ]
            built.not_used += [
                prompt.without_sample(self._learner.name, candidate, "not_shared")
                for candidate in prompt.not_shared
            ]
            for candidate in prompt.failed:
                built.dropped[candidate.source, "environment_failed"] += 1
                built.not_used.append(
                    prompt.without_sample(self._learner.name, candidate, "environment_failed")
                )
        return built

    def _prompt_state(
        self,
        group: PromptGroup,
        method: Method,
        ratio: CapabilityRatio,
        seed: int,
        trusted: frozenset[str] | None,
        has_probes: bool,
    ) -> _PromptState:
        """Choose which responses to the prompt to try first, and which are reserves.

        ``trusted``: partners that are not trusted have probes at most; None: the method does not ask for
        trust. ``has_probes``: whether they have probes on this prompt.
        """
        rewards = compared_rewards(group, self._overlong)
        failed = self._failed(group)
        candidates: list[Candidate] = []
        not_shared: list[Candidate] = []
        if self._learner.name not in rewards:  # nothing to compare other agents' responses with
            left = [
                Candidate(source, index, verified.reward, 0.0, group.step)
                for source, responses in group.counted.items()
                for index, verified in responses.items()
                if self._shares_rollouts and group.teaches(source)
            ]
            return _PromptState(group, [], [], False, left, failed)
        for source, advantages in method.advantages(rewards, self._learner.name, ratio).items():
            if not group.teaches(source):
                continue
            is_probe = trusted is not None and source != self._learner.name and source not in trusted
            for index, reward, advantage in zip(
                group.counted[source], rewards[source], advantages, strict=True
            ):
                candidate = Candidate(source, index, reward, advantage or 0.0, group.step, is_probe)
                left_out = advantage is None or (is_probe and not has_probes)
                (not_shared if left_out else candidates).append(candidate)
        has_signal = any(candidate.advantage for candidate in candidates if not candidate.is_probe)
        limit = self._max_cross_rollouts
        if limit is None:
            return _PromptState(group, candidates, [], has_signal, not_shared, failed)
        own = [candidate for candidate in candidates if candidate.source == self._learner.name]
        cross = [c for c in candidates if c.source != self._learner.name and not c.is_probe]
        probes = [candidate for candidate in candidates if candidate.is_probe]
        if len(cross) > limit:
            cross = most_useful_first(cross, seed, group.problem.id)
        if len(probes) > limit:  # chosen like responses that are trained on, and beside them
            probes = most_useful_first(probes, seed, group.problem.id)
        to_try = own + cross[:limit] + probes[:limit]
        not_shared += probes[limit:]
        return _PromptState(group, to_try, cross[limit:], has_signal, not_shared, failed)

    def _failed(self, group: PromptGroup) -> list[Candidate]:
        """Return the failed episodes that the learner would otherwise learn from."""
        return [
            Candidate(source, index, verified.reward, 0.0, group.step)
            for source, responses in group.responses.items()
            if source == self._learner.name or self._shares_rollouts
            for index, verified in enumerate(responses)
            if verified.rollout.has_failed and group.teaches(source)
        ]

    def _samples(self, rollouts: Sequence[tuple[Rollout, Candidate]]) -> list[LearnerSample | DropReason]:
        """Return a sample, or the reason for having none, for each rollout."""
        reasons = [self._reason_to_drop(rollout) for rollout, _ in rollouts]
        usable = [rollout for (rollout, _), reason in zip(rollouts, reasons, strict=True) if reason is None]
        same_tokenizer = [rollout.tokenizer == self._learner.tokenizer_fingerprint for rollout in usable]
        tokens = iter(self._retokeniser.tokens(self._learner, usable, same_tokenizer))
        return [
            self._sample(rollout, candidate, next(tokens)) if reason is None else reason
            for (rollout, candidate), reason in zip(rollouts, reasons, strict=True)
        ]

    def _reason_to_drop(self, rollout: Rollout) -> DropReason | None:
        """Return why a rollout is not even written in the learner's tokens."""
        if not rollout.segments:  # an episode whose prompt leaves no room for an action
            return "empty"
        if not rollout.has_logprobs:
            if self._needs_logprobs:
                return "no_logprobs"
        elif not math.isfinite(rollout.logprob):
            return "non_finite"
        if self._mask_truncated and rollout.finish_reason == "length":
            return "truncated"
        return None

    def _sample(
        self, rollout: Rollout, candidate: Candidate, tokens: LearnerTokens | DropReason
    ) -> LearnerSample | DropReason:
        if isinstance(tokens, str):
            return tokens
        kept, loss_mask, source_logprobs = len(tokens.response_ids), tokens.loss_mask, rollout.token_logprobs
        if not self._learn_stop_token:  # the last one is removed; an episode's others are context
            kept -= rollout.ends_with_stop_token
            stops = frozenset(tokens.stops)
            loss_mask = tuple(used and t not in stops for t, used in enumerate(loss_mask[:kept]))
            source_logprobs = without_stop_tokens(rollout)
        if not any(loss_mask) or (rollout.has_logprobs and not source_logprobs):
            return "empty"
        return LearnerSample(
            prompt_ids=tokens.prompt_ids,
            response_ids=tokens.response_ids[:kept],
            behaviour_logprobs=source_logprobs if tokens.reused else None,
            behaviour_logprob=math.fsum(source_logprobs) if rollout.has_logprobs else None,
            source_length=len(source_logprobs) or rollout.num_tokens or sum(loss_mask),
            source=rollout.agent,
            is_own=rollout.agent == self._learner.name,
            advantage=candidate.advantage,
            loss_mask=loss_mask,
            problem=rollout.problem.id,
            index=candidate.index,
            is_current=self._is_current(rollout),
            step=candidate.step,
            is_probe=candidate.is_probe,
        )

    def _is_current(self, rollout: Rollout) -> bool:
        """Return whether the learner's present policy sampled the whole response."""
        version = self._learner.policy_version
        return rollout.oldest_version == version == rollout.newest_version


def without_stop_tokens(rollout: Rollout) -> tuple[float, ...]:
    """Return the log-probabilities of the action tokens that do not end an action as its stop token."""
    last = len(rollout.segments) - 1
    stops = [segment.finish_reason == "stop" for segment in rollout.segments[:last]]
    return tuple(
        logprob
        for segment, has_stop in zip(rollout.segments, [*stops, rollout.ends_with_stop_token], strict=True)
        for logprob in segment.token_logprobs[: -1 if has_stop else None]
    )


def compared_rewards(group: PromptGroup, overlong: tuple[int, int]) -> dict[str, tuple[float, ...]]:
    """Return the rewards that advantages compare: the verdicts', less for overlong responses.

    There are none of failed episodes.

    ``overlong``: longest response and buffer of the soft overlong punishment.
    """
    longest, buffer = overlong
    if not buffer:
        return group.rewards
    return {
        agent: tuple(
            verified.reward + overlong_penalty(verified.rollout.num_tokens, longest, buffer)
            for verified in responses.values()
        )
        for agent, responses in group.counted.items()
    }


def most_useful_first(candidates: Iterable[Candidate], seed: int, prompt: str) -> list[Candidate]:
    """Return the candidates of one prompt, most useful first. Their given order does not matter.

    Candidates with advantage 0 come last. Among the others the highest reward comes first: correct answers
    teach more than other agents' mistakes, which the learner need not make. Among equals the source that was
    chosen least often is next, so that no source crowds out the rest. Draws are keyed by seed and prompt.
    """
    rng = random.Random(derive_seed(seed, prompt))
    shuffled = sorted(candidates, key=lambda candidate: (candidate.source, candidate.index))
    rng.shuffle(shuffled)
    sources = sorted({candidate.source for candidate in shuffled})
    rng.shuffle(sources)
    tiers: dict[tuple[bool, float], dict[str, list[Candidate]]] = {}
    for candidate in shuffled:
        tier = tiers.setdefault((candidate.advantage == 0, -candidate.reward), {})
        tier.setdefault(candidate.source, []).append(candidate)
    times_chosen = dict.fromkeys(sources, 0)
    order: list[Candidate] = []
    for _, by_source in sorted(tiers.items()):
        while by_source:
            # min returns the first of equals, and sources are in random order
            source = min(times_chosen, key=lambda name: (name not in by_source, times_chosen[name]))
            order.append(by_source[source].pop())
            times_chosen[source] += 1
            if not by_source[source]:
                del by_source[source]
    return order
