"""How an evaluation is cut into pieces, worked out by hand."""

from __future__ import annotations

from hacrl.evaluation.chunks import Chunk, plan_chunks


def test_a_chunk_holds_as_many_problems_as_the_batch_allows():
    # 5 problems x 2 responses, 6 side by side: 3 problems, then 2
    plan = plan_chunks([7] * 5, None, 100, samples=2, batch=6)
    assert plan.chunks == (Chunk((0, 1, 2), 0, 2, 100), Chunk((3, 4), 0, 2, 100))
    assert plan.response_count == 10
    assert plan.chunks[1].slots == [(3, 0), (3, 1), (4, 0), (4, 1)]


def test_more_samples_than_the_batch_are_split():
    plan = plan_chunks([7, 7], None, 100, samples=5, batch=2)
    assert [(chunk.positions, chunk.first_sample, chunk.samples) for chunk in plan.chunks] == [
        ((0,), 0, 2),
        ((0,), 2, 2),
        ((0,), 4, 1),
        ((1,), 0, 2),
        ((1,), 2, 2),
        ((1,), 4, 1),
    ]


def test_the_context_shortens_all_responses_alike():
    # context 100: the longest prompt of at most 50 is 40, so everyone gets 60 of the 80 asked for
    plan = plan_chunks([10, 40, 20], 100, 80, samples=1, batch=8)
    assert plan.chunks == (Chunk((0, 1, 2), 0, 1, 60),)
    assert (plan.max_new_tokens, plan.shortened, plan.unanswered) == (60, (), ())


def test_long_prompts_get_the_rest_of_the_context_and_shorten_no_other():
    # 90 leaves 10, 100 and 130 leave nothing; 10 and 30 set the common length: 100 - 30 = 70
    plan = plan_chunks([10, 90, 130, 30, 100], 100, 80, samples=2, batch=8)
    assert plan.chunks == (
        Chunk((0, 3), 0, 2, 70),
        Chunk((1,), 0, 2, 10),
        Chunk((2,), 0, 2, 0),
        Chunk((4,), 0, 2, 0),
    )
    assert (plan.max_new_tokens, plan.shortened, plan.unanswered) == (70, (1,), (2, 4))
    assert plan.response_count == 10


def test_long_prompts_with_enough_room_are_like_the_others():
    plan = plan_chunks([10, 90], 100, 10, samples=1, batch=8)
    assert plan.chunks == (Chunk((0, 1), 0, 1, 10),)
    assert plan_chunks([90, 95], 100, 80, 1, 8).shortened == (0, 1)
