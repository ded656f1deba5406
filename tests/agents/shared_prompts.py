"""Sequences that share a prompt, or nothing; attention over them by the long way round, and gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hacrl.agents.attention import Segments, packed_attention
from hacrl.agents.shared_keys import Shared, backwards, handed_out


def starts(*lengths: int) -> Tensor:
    return pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def shared_prompt(prompt: int, *responses: int) -> tuple[int, Segments, Shared]:
    """Tokens of a prompt and its responses, all of whom see the prompt."""
    places, place = list(range(prompt)), prompt
    for response in responses:
        places += [*range(prompt), *range(place, place + response)]
        place += response
    theirs = [prompt + response for response in responses]
    own = starts(prompt, *responses)
    segments = Segments(own, starts(prompt, *theirs), max(prompt, *responses), max(theirs))
    found = torch.tensor(places)
    return place, segments, Shared(found, *backwards(found, place))


def apart(*lengths: int) -> tuple[int, Segments, None]:
    return sum(lengths), Segments(starts(*lengths), starts(*lengths), max(lengths), max(lengths)), None


def long_way_round(query, key, value, segments, shared, scale, window) -> Tensor:
    if shared is not None:
        key, value = handed_out(key, Shared(shared.places)), handed_out(value, Shared(shared.places))
    return packed_attention(query, key, value, segments, scale, window)


def with_gradients(attend, given, *told) -> list[Tensor]:
    *inputs, weights = given
    out = attend(*inputs, *told)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
