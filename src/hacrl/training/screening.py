"""Find responses without a gradient by a forward pass, so that only the others get a backward pass.

The gradient of the loss L is a sum over responses i and their tokens t:

    dL/dw = sum_i  sum_t  g_it * d log pi(y_it) / dw,      g_it = dL / d log pi(y_it)

Clipping makes g_i exactly 0: the response adds nothing, and its backward pass is work for nothing. g follows
from the log-probabilities alone. So a forward pass without gradients gives the loss, all statistics and g, to
the bit as a training pass over the same micro-batch does. Responses with g_i != 0 are then computed once
more, in micro-batches of their own, with g as the gradient of their log-probabilities. This works for every
loss whose value for one response does not depend on the others, a KL term included.

Only the order changes in which floats are added. Gradients are equal up to rounding, as between two sizes of
micro-batches. They are equal to the bit where the micro-batches with a gradient are the same.

The forward pass pays if it saves more than it costs (:class:`ScreeningPolicy`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl.config.schema import SkipZeroGradient
from hacrl.models.device import HostCopy
from hacrl.models.rank_group import Ranks
from hacrl.training.batching import needed_tokens
from hacrl.training.learn_stats import LearnStats
from hacrl.types import LearnerSample

# Screening must save this share of the work: smaller micro-batches use a device less well.
MIN_SAVING = 0.05


class ScreeningPolicy:
    """Decides whose responses are screened, by what share of their tokens had a gradient before.

    The share is kept for each source and each update of a step, because clip ranges narrow from update to
    update. It is the mean of the last measurement and the share before it, so that recent steps count most.
    No time is measured: equal runs decide alike, and so do all ranks of an agent.
    """

    def __init__(self, mode: SkipZeroGradient, model: Any) -> None:
        self._mode = mode
        self._forward_share = forward_share(model)
        self._shares: dict[
            str, dict[int, float]
        ] = {}  # source -> update of the step -> share with a gradient

    def sources(self, samples: Sequence[LearnerSample], update: int, packed: bool) -> frozenset[str]:
        """Return the sources whose responses are to be screened in the step's update ``update``, from 0."""
        present = {sample.source for sample in samples}
        if self._mode != "auto":
            return frozenset(present if self._mode == "always" else ())
        shares = {source: self._expected_share(source, update) for source in present}
        screened = {source for source, share in shares.items() if 1 - share > self._forward_share}
        by_source = [
            (needed_tokens([sample for sample in samples if sample.source == source], packed), shares[source])
            for source in sorted(screened)
        ]
        others = needed_tokens([sample for sample in samples if sample.source not in screened], packed)
        forward = sum(tokens for tokens, _ in by_source) * self._forward_share
        work = forward + sum(tokens * share for tokens, share in by_source) + others
        # Responses of several sources that are computed apart no longer share their prompts.
        saves = work < (1 - MIN_SAVING) * needed_tokens(samples, packed)
        return frozenset(screened if saves else ())

    def _expected_share(self, source: str, update: int) -> float:
        """Return the share of this update in earlier steps, else of an earlier update; 1 if none is known."""
        known = self._shares.get(source, {})
        return known[max(found)] if (found := [number for number in known if number <= update]) else 1.0

    def record(self, stats: LearnStats, update: int) -> None:
        """Take in the numbers of an update that was made; ``update`` is its number in the step, from 0."""
        for source, numbers in stats.sources.items():
            if numbers.pass_tokens:
                share = numbers.gradient_tokens / numbers.pass_tokens
                known = self._shares.setdefault(source, {})
                known[update] = (known[update] + share) / 2 if update in known else share

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the shares as JSON values, for exact resume."""
        return {
            source: {str(update): share for update, share in sorted(known.items())}
            for source, known in sorted(self._shares.items())
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._shares = {
            source: {int(update): share for update, share in known.items()} for source, known in state.items()
        }


def forward_share(model: Any) -> float:
    """Return what share a forward pass is of a forward and backward pass, by the count of multiplications.

    The backward pass multiplies once for the gradients of activations and once for those of trained weights.
    Gradient checkpointing adds a forward pass.
    """
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained: float = sum(size for size, is_trained in sizes if is_trained) / sum(size for size, _ in sizes)
    return 1 / (2 + trained + (1 if model.is_gradient_checkpointing else 0))


class ScreenedRows:
    """The gradients dL / d log pi of one part of an update, which a forward pass has given.

    ``samples``: the part, the same on every rank.
    """

    def __init__(self, samples: Sequence[LearnerSample]) -> None:
        self._samples = samples
        self._unread: list[tuple[Sequence[LearnerSample], Tensor, HostCopy]] = []
        self._rows: dict[int, Tensor] = {}  # by id(sample): two rollouts may have equal tokens

    def add(self, micro_batch: Sequence[LearnerSample], gradient_BT: Tensor) -> None:
        """Keep the rows of one micro-batch that are not zero. This does not wait for the device."""
        has_gradient_B = (gradient_BT != 0).any(dim=-1)  # also if it is not a number
        self._unread.append((micro_batch, gradient_BT, HostCopy(has_gradient_B)))

    def with_gradient(self, ranks: Ranks) -> list[LearnerSample]:
        """Wait for the device and for all ranks; return the samples with a gradient, alike on every rank."""
        for micro_batch, gradient_BT, copied in self._unread:
            (has_gradient_B,) = copied.wait()
            for row in has_gradient_B.nonzero().flatten().tolist():
                sample = micro_batch[row]
                self._rows[id(sample)] = gradient_BT[row, : len(sample.response_ids)]
        self._unread.clear()
        if ranks.is_group:
            self._exchange(ranks)
        return [sample for sample in self._samples if id(sample) in self._rows]

    def _exchange(self, ranks: Ranks) -> None:
        """Give every rank the rows of all ranks, to the bit, so that they can divide the work anew."""
        own = [(number, s) for number, s in enumerate(self._samples) if id(s) in self._rows]
        sent = [self._rows[id(sample)].double().cpu() for _, sample in own]
        data = torch.cat(sent).numpy().tobytes() if sent else b""
        numbers = ranks.gather(json.dumps([number for number, _ in own]).encode())
        for listed, values in zip(numbers, ranks.gather(data), strict=True):
            found = [self._samples[number] for number in json.loads(listed)]
            if not found:
                continue
            received = torch.frombuffer(bytearray(values), dtype=torch.float64)
            parts = torch.split(received, [len(sample.response_ids) for sample in found])
            for sample, row in zip(found, parts, strict=True):
                self._rows.setdefault(id(sample), row)

    def gradient(self, micro_batch: Iterable[LearnerSample], like_BT: Tensor) -> Tensor:
        """Return the rows of samples with a gradient, right-padded, in the form of ``like_BT``; (B, T)."""
        rows = [self._rows[id(sample)].to(like_BT) for sample in micro_batch]
        return pad_sequence(rows, batch_first=True)
