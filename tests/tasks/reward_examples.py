"""Reward functions that tests name as ``tests.tasks.reward_examples:NAME``."""

from __future__ import annotations


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def broken(completions, **kwargs):
    raise KeyError("oops")


class Matcher:
    @staticmethod
    def same(completions, answer, **kwargs):
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


not_callable = 7
