"""A growing cache holds what transformers' dynamic cache holds, and copies less."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from hacrl.engines.hf.batch_decoding import GrowingLayer, growing_cache
from tests.support.tiny import char_agent


def states(tokens: int, rows: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 2, tokens, 4, generator=generator) for _ in "kv")  # type: ignore[return-value]


def test_a_growing_cache_holds_what_a_dynamic_cache_holds() -> None:
    config = char_agent().model.config
    mine, theirs = growing_cache(config), DynamicCache(config=config)
    assert all(type(layer) is GrowingLayer for layer in mine.layers)
    steps = [(5, 3), (1, 3), (1, 3), (2, 3), (16, 3), (1, 3)]
    for number, (tokens, rows) in enumerate(steps):
        found = mine.update(*states(tokens, rows, number), 0)
        expected = theirs.update(*states(tokens, rows, number), 0)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert mine.get_seq_length() == theirs.get_seq_length()
    for cache in (mine, theirs):
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 1, 3]))
    for number in range(7, 10):
        found = mine.update(*states(1, 4, number), 0)
        expected = theirs.update(*states(1, 4, number), 0)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_tokens_are_copied_only_when_the_buffer_is_full(monkeypatch) -> None:
    layer, made = GrowingLayer(), []
    grow = GrowingLayer._grow
    monkeypatch.setattr(GrowingLayer, "_grow", lambda self, n: made.append(n) or grow(self, n))
    layer.update(*states(5))
    for _ in range(2 * 16 + 2):
        layer.update(*states(1))
    # 5 + 1 + 16 fit; the 18th new token does not, and neither does one 17 later
    assert made == [22, 39]


def test_a_longer_cache_grows_by_more() -> None:
    """500 held ones and a new one have room for 500 / 16 = 31 more."""
    layer = GrowingLayer()
    layer.update(*states(500))
    layer.update(*states(1))
    assert layer._buffers is not None
    assert layer._buffers[0].shape[-2] == 501 + 31
