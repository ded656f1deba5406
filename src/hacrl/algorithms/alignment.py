"""Trust by gradient alignment: theorem 4.3 measured, for each learner and source (``rules/aligned.py``).

    c_kj(t) = <g_k, g_j> / (|g_k| |g_j|)      gradients of learner k's loss before step t's first update:
                                              g_k on own responses, g_j on those of source j
    k trusts j  if and only if  mean(c_kj) > std(c_kj) / sqrt(n)   over the n <= K last measurements, n >= 2

To first order, an update along g_j changes the own objective by <g_k, g_j>. Where the mean cosine is above 0,
partner j helps on average whatever it writes and however far away it is; where it is not, partner j costs at
least the update.

Why the standard error, and why K = 5. A measurement is noisy: a partner that has nothing to do with the
learner has cosines around 0, of either sign. Against a bound of 0 such a partner would be trusted half of the
time. Against one standard error it is trusted in about one of five steps (Student's t with 4 degrees of
freedom: P(t > 1) = 0.19), and a partner whose mean cosine is twice the standard deviation of a measurement is
trusted with probability above 0.99. A longer window tells smaller means from 0, in proportion to 1 / sqrt(K),
and notices a change later, by up to K steps. It is the only constant of the rule, and five is the window that
the paper averages capabilities over, where the same trade-off decides.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alignment:
    """What was measured of one source's gradient and the learner's own."""

    dot: float  # <g_k, g_j>
    own_norm: float  # |g_k|
    source_norm: float  # |g_j|

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the gradients; 0 if the source's is zero."""
        product = self.own_norm * self.source_norm
        return self.dot / product if product > 0 else 0.0


class TrustTracker:
    """Which partners one learner trusts, by the cosines of the last K steps."""

    def __init__(self, window: int = 5) -> None:
        if window < 2:
            raise ValueError(f"window must be at least 2 steps, not {window}")
        self._window = window
        self._cosines: dict[str, deque[float]] = {}

    def record(self, source: str, measured: Alignment, is_stronger: bool = False) -> None:
        """Add one step's measurement. ``is_stronger``: the source is more capable than the learner.

        A learner without a gradient of its own cannot judge. It has nothing to lose, so a stronger source
        that has a gradient counts as aligned, and any other source is left as it was.
        """
        if not (math.isfinite(measured.own_norm) and math.isfinite(measured.source_norm)):
            return
        if measured.own_norm > 0:
            cosine = measured.cosine
        elif is_stronger and measured.source_norm > 0:
            cosine = 1.0
        else:
            return
        self._cosines.setdefault(source, deque(maxlen=self._window)).append(cosine)

    def trusts(self, source: str) -> bool:
        """Return whether the mean cosine is above its standard error; False before two measurements."""
        cosines = self._cosines.get(source, ())
        if len(cosines) < 2:
            return False
        return statistics.fmean(cosines) > statistics.stdev(cosines) / math.sqrt(len(cosines))

    @property
    def trusted(self) -> frozenset[str]:
        """All trusted sources."""
        return frozenset(source for source in self._cosines if self.trusts(source))

    def mean(self, source: str) -> float | None:
        """Return the mean cosine; None before the first measurement."""
        cosines = self._cosines.get(source)
        return statistics.fmean(cosines) if cosines else None

    def state_dict(self) -> dict[str, list[float]]:
        """Return the last cosines as lists that JSON can hold, for exact resume."""
        return {source: list(cosines) for source, cosines in self._cosines.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self._cosines = {source: deque(values, maxlen=self._window) for source, values in state.items()}
