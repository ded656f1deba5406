"""A tokenizer that makes several tokens of one of its partner's, measured on prompts and on rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hacrl.models.tokenizing import TextCodec
from hacrl.training.health.symptoms import Check, StepView, Symptom
from hacrl.types import Problem

# Between sound tokenizers of different families the same English takes up to 1.3 times, digits up to 2 times
# as many tokens. A tokenizer that was converted wrongly made 3.3 times as many.
RATIO = 2.2
FEWEST_RESPONSES = 8  # of which a mean ratio is more than chance
FEWEST_TOKENS = 100  # of all prompts together
SAMPLED_PROBLEMS = 100
FIX = (
    "A tokenizer that is broken (a lossy conversion, missing merges) writes nearly one token a character, "
    "and the model then reads text as it never saw it: compare it with the published one"
)


def prompt_token_notes(codecs: Sequence[TextCodec], problems: Sequence[Problem]) -> list[str]:
    """Return a note on each agent whose tokenizer makes far more tokens of the prompts than a partner's.

    The prompts are compared as the task writes them, without the agents' chat templates.
    """
    texts = [text for problem in problems[:SAMPLED_PROBLEMS] for text in _texts(problem)]
    characters = sum(map(len, texts))
    counts = {codec.name: _tokens(codec, texts) for codec in codecs}
    fewest = min(counts, key=lambda name: counts[name])
    if counts[fewest] < FEWEST_TOKENS:
        return []
    return [
        f"the tokenizer of agent {name} makes {count / counts[fewest]:.1f} times as many tokens of the "
        f"prompts as that of {fewest} ({count / characters:.2f} tokens a character, not "
        f"{counts[fewest] / characters:.2f}). {FIX}"
        for name, count in counts.items()
        if count > RATIO * counts[fewest]
    ]


def more_tokens(view: StepView) -> Iterator[Symptom]:
    """Find an agent that needs far more tokens than a partner for the partner's responses, or far fewer."""
    for name, agent in view.agents.items():
        for partner, found in agent.learning.retokenised.items():
            if found.rollouts < FEWEST_RESPONSES:
                continue
            if found.length_ratio > RATIO:
                yield Symptom(
                    name, _note(name, partner, found.length_ratio, f"{partner}'s responses"), partner
                )
            elif 0 < found.length_ratio < 1 / RATIO:
                yield Symptom(
                    partner, _note(partner, name, 1 / found.length_ratio, "its own responses"), name
                )


def _note(agent: str, partner: str, ratio: float, texts: str) -> str:
    return (
        f"the tokenizer of agent {agent} makes {ratio:.1f} times as many tokens of {texts} as that of "
        f"{partner}. {FIX}"
    )


def _texts(problem: Problem) -> Iterator[str]:
    yield from (turn.content for turn in problem.context)
    yield problem.prompt


def _tokens(codec: TextCodec, texts: Sequence[str]) -> int:
    encoded = codec.tokenizer(list(texts), add_special_tokens=False).input_ids
    return sum(map(len, encoded))


CHECKS = (Check("more_tokens", more_tokens),)
