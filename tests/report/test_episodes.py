"""The page's data of episodes: turns in order, each with its own tokens, and how the episode ended."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from hacrl.report.rollouts import RolloutSampler
from hacrl.rollouts.log import RolloutLog
from hacrl.types import (
    Episode,
    LearntRollout,
    Problem,
    Rollout,
    Segment,
    Tool,
    ToolCall,
    Turn,
    Verdict,
    VerifiedRollout,
)

CALL = ToolCall("add", '{"a": 1, "b": 2}')
PROBLEM = Problem("p", "1+2?", "3", tools=(Tool("add", "Add two numbers.", "{}"),))


class Letters:
    """Token texts of a tokenizer whose token is a character's code point; 0 is the stop token."""

    def pieces(self, ids, text):
        return ["<stop>" if token == 0 else chr(token) for token in ids]


def action(text: str, *calls: ToolCall) -> Segment:
    ids = (*map(ord, text), 0)
    logprobs = tuple(-0.5 for _ in ids)
    return Segment("action", text, ids, logprobs, turns=(Turn("assistant", "", calls),), finish_reason="stop")


def write(folder: Path, episode: Episode, *segments: Segment) -> RolloutSampler:
    rollout = Rollout(PROBLEM, "ada", segments, "stop", 0, "letters", episode=episode)
    log = RolloutLog(folder)
    log.append(1, "ada", [VerifiedRollout(rollout, Verdict(1.0, "correct"))])
    ids = rollout.token_ids
    view = LearntRollout("ada", "ada", "p", 0, "used", 1.0, 1.0, 0.0, 0.1, None, (-1.0,) * len(ids))
    log.append_learnt(1, "ada", [view])
    return RolloutSampler(folder, ["ada"], {"ada": Letters()})


def test_turns_are_in_order_with_their_tokens(tmp_path: Path):
    observation = Segment("observation", "\n3\n", (10, 51, 10), turns=(Turn("tool", "3", tool="add"),))
    sampler = write(
        tmp_path,
        Episode("answered", "plain", opening="Go.", turn_rewards=(0.0, 1.0)),
        action("add", CALL),
        observation,
        action("3"),
    )
    (prompt,) = sampler.step(1, 10_000).prompt_data
    assert prompt["tools"] == [{"name": "add", "text": "Add two numbers."}]
    (answer,) = prompt["rollouts"]
    assert answer["n"] == 6  # four and two action tokens, stop tokens included
    assert (answer["p"], answer["l"]) == (None, [])
    assert answer["e"] == {
        "end": "answered",
        "opening": "Go.",
        "turns": [
            {
                "n": 4,
                "t": "add",
                "p": ["a", "d", "d", "<stop>"],
                "l": [-0.5] * 4,
                "c": [["add", CALL.arguments]],
                "r": 0.0,
            },
            {"n": 3, "t": "\n3\n", "o": [["add", "3"]]},
            {"n": 2, "t": "3", "p": ["3", "<stop>"], "l": [-0.5] * 2, "c": [], "r": 1.0},
        ],
    }
    assert len(answer["k"][0]["l"]) == 9  # the learner's numbers of all tokens: four, three and two


def test_tokens_that_a_learner_only_reads_are_named_by_their_place(tmp_path: Path):
    write(tmp_path, Episode("answered", "plain"), action("ab"))
    mask = (True, False, False, True, False)
    view = LearntRollout("bob", "ada", "p", 0, "used", 1.0, 1.0, 0.0, 0.1, (97, 98, 99, 100, 101), None, mask)
    RolloutLog(tmp_path).append_learnt(1, "bob", [view])
    sampler = RolloutSampler(tmp_path, ["ada", "bob"], {"ada": Letters(), "bob": Letters()})
    (answer,) = sampler.step(1, 10_000).prompt_data[0]["rollouts"]
    assert [read.get("o") for read in answer["k"]] == [None, [[1, 2], [4, 1]]]  # ada, bob


def test_an_episode_that_is_too_long_for_the_page_keeps_its_turns_without_tokens(tmp_path: Path):
    rng = random.Random(0)
    words = "".join(chr(rng.randrange(33, 123)) for _ in range(3_000))
    logprobs = tuple(-rng.random() for _ in range(3_001))  # do not compress
    long = replace(action(words), token_logprobs=logprobs)
    sampler = write(tmp_path, Episode("failed", "plain", failure="it raised ValueError"), long)
    whole = sampler.step(1, 1_000_000)
    assert whole.shortened == 0
    fitting = len(whole.encoded()) - 2_000
    shortened = sampler.step(1, fitting)
    assert (shortened.kept, shortened.shortened) == (1, 1)
    (answer,) = shortened.prompt_data[0]["rollouts"]
    assert answer["e"] == {
        "end": "failed",
        "failure": "it raised ValueError",
        "turns": [{"n": 3_001, "t": words, "c": []}],
    }
