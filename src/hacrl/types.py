"""The records that the layers exchange. They are frozen and depend on no framework but torch.

Axis legend, used as suffixes wherever a tensor is named: ``B`` responses in a batch, ``T`` token
positions (learner's token space), ``V`` vocabulary. A field without a suffix is a scalar.

One response passes through these records::

    Problem ──▶ Rollout (one agent's text) ──▶ VerifiedRollout (with verdict)
            ──▶ LearnerSample (in one learner's tokens) ──▶ LossBatch (tensors of one micro-batch)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hacrl.json_values import is_plain_json

if TYPE_CHECKING:
    from torch import Tensor

# "stop": by a stop token. "stop_string": by one of rollout.stop. "length": cut by rollout.max_new_tokens
FinishReason = Literal["stop", "stop_string", "length"]
SegmentKind = Literal["action", "observation"]
# Why an episode with an environment ended. "done": the environment said so. "answered": the agent called no
# tool. "max_turns", "max_tokens", "max_seconds": a limit of the task. "failed": the environment raised an
# error, hung or died.
EpisodeEnd = Literal["done", "answered", "max_turns", "max_tokens", "max_seconds", "failed"]
# "scored": a reward function gave a number that does not mean right or wrong
VerdictLabel = Literal["correct", "wrong", "unparsable", "timeout", "crash", "scored"]
Role = Literal["system", "user", "assistant", "tool"]
# What became of a rollout at one learner. "used": its gradient is in an update, at least in part.
# "clipped_below", "clipped_above": clipping removed all of its gradient, because the ratio was below or above
# the clip range. "no_signal": the advantage is 0. "bad_update": the update was left out, because it was not
# finite. "over_limit": more than learning.max_cross_rollouts. "not_shared": the method's rule for sharing
# leaves it out. "environment_failed": the episode broke off through no fault of the agent. The others are
# reasons to drop a rollout.
Fate = Literal[
    "used",
    "clipped_below",
    "clipped_above",
    "no_signal",
    "bad_update",
    "over_limit",
    "not_shared",
    "environment_failed",
    "too_long",
    "not_representable",
    "non_finite",
    "empty",
    "truncated",
    "no_logprobs",
]
# Which policy sampled how many tokens, in order: (policy version, number of tokens)
VersionSpans = tuple[tuple[int, int], ...]
RatioLength = Literal[
    "source", "own"
]  # whose token count normalises the importance ratio of another agent's response


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that responses are sampled from. Temperature 0 means greedy decoding."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit
    stop: tuple[str, ...] = ()  # texts that end a response; they change no probability


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call while it answers, as chat templates know it."""

    name: str
    description: str
    parameters: str  # JSON schema of the arguments, as text, so that a tool is hashable


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, in no model's own format, e.g. ``ToolCall("add", '{"a": 1, "b": 2}')``."""

    name: str
    arguments: str  # a JSON object, as text


class Turn(NamedTuple):
    """One turn of a conversation, e.g. ``Turn("system", "Answer briefly.")``.

    It has no model's control tokens and no model's tool format, so that every chat template can write it.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool: str = ""  # whose result a tool's turn is

    def as_message(self) -> dict[str, Any]:
        """Return the turn in the form that chat templates read."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool:
            message["name"] = self.tool
        return message


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a checkable answer, e.g. ``Problem("(23+14)*2", "(23+14)*2:", "74")``."""

    id: str  # equal questions have equal ids, so that splits can be checked for overlap
    prompt: str  # the question, before the agent's own chat template
    answer: str  # the gold answer, as text
    context: tuple[Turn, ...] = ()  # turns before the prompt: a system prompt, worked examples
    # further columns of the data set; plain JSON values only
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tools: tuple[Tool, ...] = ()  # that the model may call; the prompt describes them
    environment: str = ""  # which of the task's environments the episode is played in

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            if not is_plain_json(value):
                raise ValueError(
                    f"problem {self.id!r}: field {name!r} must be a plain JSON value, not {value!r:.100}"
                )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's judgement of one response.

    If several rewards were added, e.g. ``Verdict(1.5, "scored", {"correct": 1.0, "brief": 0.5})``.
    """

    reward: float
    label: VerdictLabel
    # reward function -> its value, before weights; None: the function does not apply to the response
    rewards: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)  # further plain JSON values to log
    # numbers that were logged when the response's batch was judged; the same for the whole batch
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a rollout: an action that the policy sampled, or an observation from the environment.

    ``text`` and ``stop_text`` are the decoded ``token_ids``, without the stop token of an action.
    Log-probabilities are under the sampling distribution: temperature, top-k and top-p included.
    """

    kind: SegmentKind
    text: str
    token_ids: tuple[int, ...]  # in the source's token space; empty where the source returns text only
    # One per token of an action; empty for an observation. Empty as well where the source gives none.
    token_logprobs: tuple[float, ...] = ()
    # Set if the weights were updated while the action was sampled. Empty: the rollout's policy_version.
    versions: VersionSpans = ()
    # the stop string that ended the last action, and what its last token wrote after it; no verifier sees it
    stop_text: str = ""
    # Only in episodes. An action stands for one turn of the assistant; an observation for the turns of tools
    # or the user that answer it. Learners with another chat template write these turns in their own way.
    turns: tuple[Turn, ...] = ()
    # Only of an episode's actions: "stop" if the last token is a stop token, which is not part of the text
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        expected = 0
        if self.kind == "action":  # without ids, log-probabilities are all that is known of the tokens
            expected = len(self.token_ids or self.token_logprobs)
        if len(self.token_logprobs) != expected:
            raise ValueError(
                f"an {self.kind} segment of {len(self.token_ids)} tokens must have {expected} "
                f"log-probabilities, not {len(self.token_logprobs)}"
            )
        if self.versions and sum(tokens for _, tokens in self.versions) != expected:
            raise ValueError(
                f"the policy versions of an {self.kind} segment must cover its {expected} sampled tokens, "
                f"not {list(self.versions)}"
            )


@dataclass(frozen=True, slots=True)
class Episode:
    """What a rollout with an environment has beside its segments."""

    end: EpisodeEnd
    dialect: str  # fingerprint of the source's chat template and tool format (Dialect.fingerprint)
    opening: str = ""  # what the environment's reset added to the prompt
    turn_rewards: tuple[float, ...] = ()  # one per action, if the environment rewards every turn
    reward: float | None = None  # of the whole episode; None: the environment failed, or gives no rewards
    failure: str = ""  # why the environment failed
    # "timeout": it did not answer in time. "crash": it raised an error or died.
    failure_kind: Literal["", "timeout", "crash"] = ""
    tool_errors: int = 0  # tool calls whose result is an error
    # what was wrong with tool calls that could not be read, a sentence per action that had some
    unread_calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remote:
    """What is known of a response beside its text, if its source is an endpoint, which returns no token ids.

    The log-probabilities of its segment, if there are any, are one per token of the source.
    """

    tokens: int = 0  # that the source counted; 0: it does not say
    # Whether a learner's response ends with the learner's stop token, as the source's ended with its own.
    # False also if the source ended by itself, but the log-probabilities leave its stop token out.
    has_stop_token: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response of one agent, with the log-probabilities of its tokens when they were sampled.

    A single-turn response is one action segment. A multi-turn response has observations between its actions.
    Observations are context: they have no log-probability and no loss.
    """

    problem: Problem
    agent: str  # name of the source agent
    segments: tuple[Segment, ...]
    # "stop", "stop_string": the last segment is an action that ends with a stop token, or a stop string
    finish_reason: FinishReason
    policy_version: int  # number of updates the source had made when it sampled the first token
    tokenizer: str  # the source's tokenizer fingerprint (TextCodec.tokenizer_fingerprint)
    prompt_ids: tuple[int, ...] = ()  # the prompt as sampled, in the source's token space
    episode: Episode | None = None  # set if the task has an environment
    remote: Remote | None = None  # set if the source is an endpoint

    def __post_init__(self) -> None:
        if self.finish_reason != "length" and (not self.segments or self.segments[-1].kind != "action"):
            raise ValueError(
                f"a rollout with finish_reason {self.finish_reason!r} must end with an action segment"
            )

    @classmethod
    def single_turn(
        cls,
        problem: Problem,
        agent: str,
        text: str,
        token_ids: tuple[int, ...],
        token_logprobs: tuple[float, ...],
        finish_reason: FinishReason,
        policy_version: int,
        tokenizer: str,
        prompt_ids: tuple[int, ...] = (),
        versions: VersionSpans = (),
        stop_text: str = "",
    ) -> Rollout:
        """Return a rollout of one action segment."""
        segment = Segment("action", text, token_ids, token_logprobs, versions, stop_text)
        return cls(problem, agent, (segment,), finish_reason, policy_version, tokenizer, prompt_ids)

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed: the reward says nothing about the agent."""
        return self.episode is not None and self.episode.end == "failed"

    @property
    def text(self) -> str:
        """The text of all segments, without the stop string that ended the last one."""
        return "".join([segment.text for segment in self.segments])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of all segments; the stop token is last if finish_reason is "stop"."""
        if len(self.segments) == 1:
            return self.segments[0].token_ids
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def token_logprobs(self) -> tuple[float, ...]:
        """One log-probability per action token, in order."""
        if len(self.segments) == 1:
            return self.segments[0].token_logprobs
        return tuple(logprob for segment in self.segments for logprob in segment.token_logprobs)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """One value per token of ``token_ids``: True for action tokens."""
        return tuple(segment.kind == "action" for segment in self.segments for _ in segment.token_ids)

    @property
    def has_logprobs(self) -> bool:
        """Whether the source's log-probabilities are known."""
        return self.remote is None or bool(self.token_logprobs)

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last action ends with a stop token, which every learner writes as its own."""
        has_stop_token = self.remote is None or self.remote.has_stop_token
        return self.finish_reason == "stop" and has_stop_token

    @property
    def num_tokens(self) -> int:
        """|y|, the number of action tokens in the source's token space; 0 if the source does not say."""
        if self.remote is not None:
            return self.remote.tokens
        return sum(len(segment.token_logprobs) for segment in self.segments)

    @property
    def versions(self) -> VersionSpans:
        """Which version of the source's policy sampled how many of the action tokens, in order."""
        if len(self.segments) == 1 and self.segments[0].versions:
            return self.segments[0].versions
        spans: list[tuple[int, int]] = []
        for segment in self.segments:
            spans += segment.versions or ((self.policy_version, len(segment.token_logprobs)),)
        return merged_spans(spans)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of the tokens."""
        return min((version for version, _ in self.versions), default=self.policy_version)

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled any of the tokens."""
        return max((version for version, _ in self.versions), default=self.policy_version)

    @property
    def logprob(self) -> float:
        """log pi_j_old(y), the source's log-probability of all action tokens; nan if it is not known."""
        if not self.has_logprobs:
            return math.nan
        return float(sum(self.token_logprobs))


@dataclass(frozen=True, slots=True)
class VerifiedRollout:
    """A rollout and its verdict: the record that agents share."""

    rollout: Rollout
    verdict: Verdict

    @property
    def reward(self) -> float:
        """R(y)."""
        return self.verdict.reward


@dataclass(frozen=True, slots=True)
class LearnerSample:
    """One verified rollout for one learner, with the learner's token ids and the learner's advantage."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # actions and observations; without the stop token if it is not trained on
    behaviour_logprobs: tuple[float, ...] | None  # per action token; None if retokenised
    behaviour_logprob: float | None  # log pi_j_old(y); None if the source does not say
    source_length: int  # |y| in the source's tokens; in the learner's if the source does not say
    source: str
    is_own: bool
    advantage: float
    loss_mask: tuple[bool, ...] = ()  # per response token: True for action tokens; default: all True
    problem: str = ""  # id
    index: int = 0  # among the source's responses to the problem
    # Whether the learner's present policy sampled the whole response. Only then are its log-probabilities
    # those that the learner would compute, numerics aside. Without effect for other agents' responses.
    is_current: bool = True
    step: int | None = None  # that the response was sampled for; None: the step that is learnt
    is_probe: bool = False  # its source's gradient is measured, but not trained on

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", full_loss_mask(self.response_ids, self.loss_mask))

    @property
    def rollout_key(self) -> tuple[str, str, int, int | None]:
        """Source, problem, index and step of a late rollout, which identify the rollout within a step."""
        return self.source, self.problem, self.index, self.step

    @property
    def loss_tokens(self) -> int:
        """Number of action tokens, in the learner's token space."""
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class LearntRollout:
    """What one learner made of one verified rollout in one step.

    Numbers are of the rollout's first use, and None if it was not used. ``agent``, ``problem`` and ``sample``
    identify the rollout in the rollout log.
    """

    learner: str
    agent: str  # the rollout's source
    problem: str  # id
    sample: int  # among the source's responses to the problem
    fate: Fate
    advantage: float  # after the capability discrepancy coefficient
    ratio: float | None = None  # s, the importance ratio
    clipped: float | None = None  # share of the response without gradient because of clipping
    weight: float | None = None  # sum over tokens of |dL/d log pi_k|, L being the loss of the update
    token_ids: tuple[int, ...] | None = None  # the response in the learner's tokens; None: the source's ids
    token_logprobs: tuple[float, ...] | None = None  # log pi_k of each response token, to 4 decimals
    # per response token: True for tokens that are learnt; None: all of them are
    loss_mask: tuple[bool, ...] | None = None
    late_from: int | None = (
        None  # earlier step that the rollout was sampled for; None: the step that is learnt
    )


def merged_spans(spans: Iterable[tuple[int, int]]) -> VersionSpans:
    """Return the spans without empty ones; neighbours of the same version become one."""
    merged: list[tuple[int, int]] = []
    for version, tokens in spans:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + tokens)
        elif tokens:
            merged.append((version, tokens))
    return tuple(merged)


def first_tokens(spans: VersionSpans, tokens: int) -> VersionSpans:
    """Return the spans of the first so many tokens."""
    kept = []
    for version, count in spans:
        kept.append((version, min(count, tokens)))
        tokens -= kept[-1][1]
    return merged_spans(kept)


def full_loss_mask(response_ids: Sequence[int], loss_mask: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the mask, or all True for an empty one. Raise ValueError if the lengths differ."""
    if not loss_mask:
        return (True,) * len(response_ids)
    if len(loss_mask) != len(response_ids):
        raise ValueError(f"a loss mask of {len(loss_mask)} values for {len(response_ids)} response tokens")
    return loss_mask


@dataclass(frozen=True, slots=True)
class LossBatch:
    """The input of every loss: one micro-batch of responses, right-padded over T."""

    logprobs_BT: Tensor  # learner's log pi_k per token, carries the gradient
    mask_BT: Tensor  # bool: action tokens
    behaviour_logprobs_BT: (
        Tensor  # log pi_j_old per token; 0 in retokenised rows, of which only the sum is known
    )
    behaviour_logprob_B: Tensor  # log pi_j_old(y)
    source_length_B: Tensor  # |y| in the source's tokens
    advantages_B: Tensor  # after the capability discrepancy coefficient
    is_own_B: Tensor  # bool: learner == source
    updates_done: int  # u: parameter updates already made in this step
    reference_logprobs_BT: Tensor | None = None  # frozen reference policy; only with a KL term
    # Log-probabilities of own rows under the sampler; only if behaviour_logprobs_BT are the learner's own.
    sampler_logprobs_BT: Tensor | None = None
    mismatch_cap: float = math.inf  # C: own rows are weighted by min(pi_old / pi_sampler, C)
    # Lengths that some losses divide by: action tokens per response of the whole mini-batch, rows without an
    # advantage included; and the longest response that can be sampled.
    mean_tokens: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The output of every loss, per response; the caller takes the mean."""

    loss_B: Tensor  # the negative objective
    ratio_B: Tensor  # s, detached
    # share of the response without gradient because its ratio is below or above the clip interval
    clipped_below_B: Tensor
    clipped_above_B: Tensor
    weight_B: Tensor  # weight w for the sampler's mismatch; a mean over tokens if w is per token
    capped_B: Tensor  # share of the response whose w was reduced to the cap
