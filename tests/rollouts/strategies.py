"""Hypothesis strategies for records."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from hacrl.types import Problem, Rollout, Segment, Turn, Verdict, VerifiedRollout

TEXT = st.text(st.characters(), max_size=12)  # lone surrogates included
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGPROBS = st.floats()
TOKENS = st.integers(0, 2**31)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PROBLEMS = st.builds(
    Problem,
    TEXT,
    TEXT,
    TEXT,
    st.lists(st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), TEXT), max_size=2).map(tuple),
    st.dictionaries(TEXT, JSON, max_size=3),
)
VERDICTS = st.builds(
    Verdict,
    FINITE,
    st.sampled_from(["correct", "wrong", "unparsable", "timeout", "crash", "scored"]),
    st.dictionaries(TEXT, st.none() | FINITE, max_size=2),
    st.dictionaries(TEXT, JSON, max_size=2),
    st.dictionaries(TEXT, FINITE, max_size=2),
)


def tuples(of: st.SearchStrategy, **options) -> st.SearchStrategy:
    return st.lists(of, max_size=6, **options).map(tuple)


@st.composite
def actions(draw: st.DrawFn) -> Segment:
    pairs = draw(st.lists(st.tuples(TOKENS, LOGPROBS), max_size=6))
    cut = draw(st.integers(0, len(pairs)))
    version = draw(st.integers(0, 2**40))
    versions = ((version, cut), (version + 1, len(pairs) - cut)) if 0 < cut < len(pairs) else ()
    return Segment(
        "action", draw(TEXT), tuple(t for t, _ in pairs), tuple(p for _, p in pairs), versions, draw(TEXT)
    )


@st.composite
def rollouts(draw: st.DrawFn, problem: Problem | None = None, agent: str | None = None) -> Rollout:
    observations = st.builds(Segment, st.just("observation"), TEXT, tuples(TOKENS), st.just(()))
    segments = [*draw(st.lists(actions() | observations, max_size=3)), draw(actions())]
    return Rollout(
        problem=draw(PROBLEMS) if problem is None else problem,
        agent=draw(TEXT) if agent is None else agent,
        segments=tuple(segments),
        finish_reason=draw(st.sampled_from(["stop", "stop_string", "length"])),
        policy_version=draw(st.integers(0, 2**40)),
        tokenizer=draw(TEXT),
        prompt_ids=draw(tuples(TOKENS)),
    )


def verified(problem: Problem | None = None, agent: str | None = None) -> st.SearchStrategy[VerifiedRollout]:
    return st.builds(VerifiedRollout, rollouts(problem, agent), VERDICTS)


def exact(value) -> str:
    """Bit for bit: nan equals nan, -0.0 differs from 0.0, and every infinity is nan, as JSON reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(exact, value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {exact(one)}" for key, one in value.items()) + "}"
    if hasattr(value, "__dataclass_fields__"):
        parts = [f"{name}={exact(getattr(value, name))}" for name in value.__dataclass_fields__]
        return f"{type(value).__name__}({', '.join(parts)})"
    return repr(value)
