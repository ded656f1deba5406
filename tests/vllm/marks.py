"""Marks of tests that need an environment with vLLM."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

IN_VLLM = [
    pytest.mark.vllm_installed,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here (make test-vllm)"),
    pytest.mark.filterwarnings("ignore"),  # importing vllm warns of much
]
