"""One verifier for all tests of a file: starting a worker costs a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hacrl.config.schema import VerifierSettings
from hacrl.tasks.math.pool import MathVerifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    # A limit no honest pair here comes near, however busy the machine.
    with MathVerifier(VerifierSettings(workers=1, time_limit=60.0)) as verifier:
        yield verifier
