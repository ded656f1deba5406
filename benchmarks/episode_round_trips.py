"""Episodes with tools, written in other families' tokens and tool formats: how many come back whole.

    python benchmarks/episode_round_trips.py qwen3=FOLDER llama3.2=FOLDER ... [--episodes 200] [--json]

A folder holds tokenizer.json and tokenizer_config.json with the chat template; NAME=FOLDER:FILE takes the
template from another file. Episodes are made up: calls with varied arguments, several calls in a turn,
thoughts, arguments of wrong types, calls in wrong formats, and a text game without tools. Every source plays
them in its own format, as far as that can say them. A learner's version is checked apart from the code that
wrote it: actions are decoded and parsed, observations must hold the contents.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoTokenizer

from hacrl.models.retokenizing import LearnerTokens, Retokeniser
from hacrl.models.tokenizing import TextCodec
from hacrl.models.tool_formats import same_turn
from hacrl.types import Episode, FinishReason, Problem, Rollout, Segment, Tool, ToolCall, Turn

WORDS = [
    "the",
    "slope",
    "of",
    "this",
    "line",
    "is",
    "three",
    "over",
    "four",
    "hence",
    "we",
    "add",
    "twelve",
    "and",
    "thirty",
    "then",
    "divide",
    "by",
    "seven",
]
ODD = ("naïve Ω ≤ 数", 'a "quoted" word', "tab\tand\nnewline", "\\frac{3}{4}", "<b>x</b>", "🙂", "[1, 2]", "")
CONTROL = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "</tool_response>")
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "text": {"type": "string"}, "rows": {"type": "array"}},
}
TOOLS = tuple(
    Tool(name, f"Works with {name}.", json.dumps(PARAMETERS)) for name in ("calculate", "look_up", "run")
)
Step = tuple[Turn, tuple[Turn, ...], FinishReason]  # action, what the environment answers, how it ended


def sentence(rng: random.Random) -> str:
    """Return a few words, numbers and formulas."""
    odd = [rng.choice(ODD)] if rng.random() < 0.2 else []
    return " ".join([*rng.choices(WORDS, k=rng.randint(3, 12)), str(rng.randint(0, 9999)), *odd]).strip()


def call(rng: random.Random) -> ToolCall:
    """Return a call with one to three arguments."""
    values = {
        "x": rng.choice([rng.randint(-99, 9999), round(rng.uniform(-5, 5), 3), 1e20]),
        "text": rng.choice([sentence(rng), *ODD]),
        "rows": [rng.randint(0, 9), sentence(rng), None, True],
    }
    names = rng.sample(list(values), k=rng.randint(1, 3))
    arguments = json.dumps({name: values[name] for name in names}, ensure_ascii=False)
    return ToolCall(rng.choice(TOOLS).name, arguments)


def results(rng: random.Random, calls: Sequence[ToolCall]) -> tuple[Turn, ...]:
    """Return one result a call; some contain control tokens of some family."""
    spelled = rng.choice(CONTROL) if rng.random() < 0.3 else ""
    return tuple(Turn("tool", sentence(rng) + spelled, tool=one.name) for one in calls)


def one_call(rng: random.Random) -> list[Step]:
    """A call a turn, with text before it in half of them; now and then a limit cuts the answer."""
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        calls = (call(rng),)
        text = sentence(rng) if rng.random() < 0.5 else ""
        steps.append((Turn("assistant", text, calls), results(rng, calls), "stop"))
    return [*steps, (Turn("assistant", sentence(rng)), (), rng.choice(["stop", "stop", "length"]))]


def several_calls(rng: random.Random) -> list[Step]:
    """Two or three calls in a turn."""
    calls = tuple(call(rng) for _ in range(rng.randint(2, 3)))
    first: Step = (Turn("assistant", sentence(rng), calls), results(rng, calls), "stop")
    return [first, (Turn("assistant", sentence(rng)), (), "stop")]


def thought(rng: random.Random) -> list[Step]:
    """A thought before the call and before the answer."""
    calls = (call(rng),)
    think = [f"<think>\n{sentence(rng)}\n</think>" for _ in range(2)]
    first: Step = (Turn("assistant", think[0], calls), results(rng, calls), "stop")
    return [first, (Turn("assistant", f"{think[1]}\n\n{sentence(rng)}"), (), "stop")]


def wrong_types(rng: random.Random) -> list[Step]:
    """Numbers as text where the tool's schema asks for a number."""
    calls = (ToolCall("calculate", json.dumps({"x": str(rng.randint(0, 99)), "text": sentence(rng)})),)
    first: Step = (Turn("assistant", "", calls), results(rng, calls), "stop")
    return [first, (Turn("assistant", sentence(rng)), (), "stop")]


def wrong_formats(rng: random.Random) -> list[Step]:
    """Text that is no call to the source, e.g. one in another family's format."""
    wrong = rng.choice(
        [
            "calculate(2 + 3)",
            "{'tool': 'calculate'}",
            '<tool_call>{"name": "calculate"',
            '<tool_call>\n{"name": "calculate", "arguments": {"x": 2}}\n</tool_call>',
            "<tool_call>\n<function=calculate>\n<parameter=x>\n2\n</parameter>\n</function>\n</tool_call>",
            '{"name": "calculate", "parameters": {"x": 2}}',
        ]
    )
    answer = (Turn("user", "This is no tool call."),)
    return [(Turn("assistant", wrong), answer, "stop"), (Turn("assistant", sentence(rng)), (), "stop")]


def text_game(rng: random.Random) -> list[Step]:
    """No tools: moves and what the player sees. A limit may cut a move, and the game goes on."""
    steps: list[Step] = []
    for _ in range(rng.randint(2, 5)):
        seen = (Turn("user", sentence(rng)),)
        steps.append((Turn("assistant", sentence(rng)), seen, rng.choice(["stop", "length"])))
    return [*steps, (Turn("assistant", sentence(rng)), (), "stop")]


KINDS: dict[str, Callable[[random.Random], list[Step]]] = {
    "one call a turn": one_call,
    "several calls a turn": several_calls,
    "thoughts": thought,
    "wrong types": wrong_types,
    "wrong formats": wrong_formats,
    "text game": text_game,
}


def play(source: TextCodec, problem: Problem, steps: Sequence[Step]) -> Rollout | None:
    """Return the episode as the source would sample it; None if the source cannot say it."""
    prompt = source.encode_prompt(problem)
    segments: list[Segment] = []
    context = prompt
    for turn, answer, reason in steps:
        text = source.dialect.action(turn, problem.tools)
        ids = None if text is None else source.encode_responses([text], [context])[0]
        if text is None or ids is None:
            return None
        ids = (*ids, source.stop_id) if reason == "stop" else ids
        segments.append(Segment("action", text, ids, (-1.0,) * len(ids), turns=(turn,), finish_reason=reason))
        context += ids
        if answer:
            seen = source.dialect.observation(answer, reason)
            segments.append(Segment("observation", seen.text, seen.ids, turns=answer))
            context += seen.ids
    dialect = Episode("answered", source.dialect.fingerprint)
    fingerprint = source.tokenizer_fingerprint
    return Rollout(problem, source.name, tuple(segments), steps[-1][2], 0, fingerprint, prompt, dialect)


def is_whole(learner: TextCodec, steps: Sequence[Step], tokens: LearnerTokens, tools: Sequence[Tool]) -> bool:
    """Return whether the learner's tokens say the steps: decoded and parsed, part by part."""
    turns: list[Turn] = []
    at, context = 0, list(tokens.prompt_ids)
    seen = iter(answer for _, answer, _ in steps if answer)
    for is_action, group in groupby(tokens.loss_mask):
        ids = tokens.response_ids[at : at + len(list(group))]
        at += len(ids)
        spoken = ids[:-1] if is_action and ids[-1] in learner.stop_ids else ids
        (text,) = learner.decode_responses([spoken], [context])
        context += ids
        if is_action:
            turns.append(learner.dialect.parse(text, tools).turn)
        else:
            contents = [turn.content.strip() for turn in next(seen)]
            written = (contents, [json.dumps(content)[1:-1] for content in contents])
            ascii_free = [json.dumps(content, ensure_ascii=False)[1:-1] for content in contents]
            if not any(all(one in text for one in form) for form in (*written, ascii_free)):
                return False
    return len(turns) == len(steps) and all(
        same_turn(turn, said) for turn, (said, *_) in zip(turns, steps, strict=True)
    )


def load(family: str) -> TextCodec:
    """Return the codec of NAME=FOLDER or NAME=FOLDER:TEMPLATE."""
    name, _, place = family.partition("=")
    folder, _, template = place.partition(":")
    if folder == "smollm2":
        from hacrl.models.smollm2 import load_tokenizer

        tokenizer = load_tokenizer()
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if template:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return TextCodec(name, tokenizer, SimpleNamespace(eos_token_id=tokenizer.eos_token_id), None)


def measure(families: Sequence[TextCodec], episodes: int) -> dict[str, dict[tuple[str, str], list[int]]]:
    """Return for each kind, source and learner how many episodes were played, and how many came back."""
    found: dict[str, dict[tuple[str, str], list[int]]] = {}
    for kind, make in KINDS.items():
        rng = random.Random(kind)
        made = [make(rng) for _ in range(episodes)]
        tools = () if kind == "text game" else TOOLS
        problems = [Problem(f"{kind} {i}", sentence(rng), "", tools=tools) for i in range(episodes)]
        found[kind] = {}
        for source in families:
            played = [play(source, problem, steps) for problem, steps in zip(problems, made, strict=True)]
            said = [(one, steps) for one, steps in zip(played, made, strict=True) if one is not None]
            for learner in families:
                if learner is source:
                    continue
                rollouts = [one for one, _ in said]
                written = Retokeniser().tokens(learner, rollouts, [False] * len(rollouts))
                whole = Counter(
                    is_whole(learner, steps, tokens, tools) if isinstance(tokens, LearnerTokens) else None
                    for tokens, (_, steps) in zip(written, said, strict=True)
                )
                assert not whole[False], f"{source.name} to {learner.name}: {whole} of {kind}"
                found[kind][source.name, learner.name] = [len(said), whole[True]]
    return found


def main() -> None:
    """Print a table of all pairs, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="+", help="NAME=FOLDER[:TEMPLATE], or NAME=smollm2")
    parser.add_argument("--episodes", type=int, default=200, help="of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    families = [load(family) for family in options.families]
    found = measure(families, options.episodes)
    if options.json:
        listed = {k: {f"{s}>{t}": pair for (s, t), pair in rows.items()} for k, rows in found.items()}
        print(json.dumps(listed, indent=2))
        return
    names = [one.name for one in families]
    for kind, rows in found.items():
        print(f"\n{kind}: share that comes back; rows are sources, columns learners\n")
        print("| | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
        for source in names:
            cells = []
            for learner in names:
                played, whole = rows.get((source, learner), [0, 0])
                cells.append(f"{whole / played:.3f}" if played else "–")
            print(f"| {source} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
