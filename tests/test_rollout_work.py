"""The workload of the rollout benchmarks: lower bounds, prompts, and answers to judge."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from hacrl.models.tokenizing import TextCodec
from hacrl.tasks.math.pool import judge_by_text
from hacrl.types import Problem, Rollout

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, no package
work = import_module("rollout_work")
costs = import_module("rollout_costs")
shapes = import_module("shapes")


def test_a_case_is_read_from_its_name() -> None:
    case = work.Work.parse("32x8x128x256")
    assert (case.prompts, case.samples, case.prompt_tokens, case.new_tokens) == (32, 8, 128, 256)
    assert case.name == "32x8x128x256"
    assert case.responses == 256


@pytest.mark.parametrize("tied", [True, False])
def test_costs_of_a_small_model_by_hand(tied: bool) -> None:
    # embeddings 10 * 8 = 80. A layer: q and o 8 * 8 each, k and v 8 * 4 each, their norms 4 + 4,
    # the MLP 3 * 8 * 6, two norms of 8: 360. Two layers and the last norm: 728, with the output layer 808.
    config = Qwen3Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
    )
    found = costs.costs_of(Qwen3ForCausalLM(config), work.Work(2, 3, 4, 8))
    # a token's keys and values: 2 * 2 layers * 4 = 16 numbers; 6 responses of 4 + 8 / 2 tokens
    assert found.step_bytes == 4 * (808 + 6 * 8 * 16)
    # attention: 4 * 2 layers * 2 heads * 4 = 64 for each pair of tokens; 48 new tokens look at 8 on average,
    # 8 prompt tokens at 2, and those need no output layer
    assert found.flops == 48 * (2 * 808 + 64 * 8) + 8 * (2 * 728 + 64 * 2)
    # 8 steps of 6,304 bytes at 1,000 bytes a second
    assert found.floor_seconds(work.Work(2, 3, 4, 8), 1000.0) == pytest.approx(50.432)


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_prompts_have_exactly_the_requested_length(tokens: int) -> None:
    codec = TextCodec("a", shapes.letter_tokenizer(2048, 0), SimpleNamespace(eos_token_id=None), None)
    problems = work.make_problems(codec, 20, tokens, seed=3)
    assert [len(codec.encode_prompt(problem)) for problem in problems] == [tokens] * 20
    again = work.make_problems(codec, 20, tokens, seed=4)
    assert tokens == 1 or not {one.prompt for one in problems} & {one.prompt for one in again}


def test_a_share_of_the_answers_needs_a_worker_and_a_third_is_wrong() -> None:
    texts = [f"text {number}" for number in range(3000)]
    for symbolic in (0.0, 0.2, 1.0):
        task = work.AnsweringTask([], symbolic)
        pairs = [task._answered(text) for text in texts]
        labels = [judge_by_text(*pair)[0] for pair in pairs]
        assert labels.count(None) / len(texts) == pytest.approx(symbolic, abs=0.03)
        if symbolic == 0:
            assert labels.count("wrong") / len(texts) == pytest.approx(1 / 3, abs=0.03)
            assert labels.count("correct") + labels.count("wrong") == len(texts)
        assert len(set(pairs)) == len(texts)


def test_answers_that_need_a_worker_are_judged_by_the_worker() -> None:
    task = work.AnsweringTask([], 1.0)
    texts = ["a", "b", "c", "d", "e", "f"]
    problem = Problem("p", "?", "")
    try:
        verdicts = task.verify(
            [Rollout.single_turn(problem, "a", text, (1,), (0.0,), "length", 0, "") for text in texts]
        )
    finally:
        task.close()
    # "… + n - n" is (x + 1) / 2 itself; "… + n - (n + 1)" is one less
    right = [answer.split(" + ")[-1] for _, answer in map(task._answered, texts)]
    expected = ["correct" if len(set(one.rstrip("}").split(" - "))) == 1 else "wrong" for one in right]
    assert [verdict.label for verdict in verdicts] == expected
    assert set(expected) == {"correct", "wrong"}
