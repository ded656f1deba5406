"""The transformers engine keeps the contract of engines, whichever way it decodes."""

from __future__ import annotations

import pytest

from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from tests.engines.engine_contract import EngineContract, EngineOf


class TestTransformersEngine(EngineContract):
    @pytest.fixture
    def engine_of(self) -> EngineOf:
        def make(agent: Agent, seeded: bool = True) -> TransformersEngine:
            return TransformersEngine(agent)

        return make


class TestContinuously(EngineContract):
    """As on a GPU, but for the graphs, and with fewer slots than there are responses."""

    @pytest.fixture(params=[3, 512])
    def engine_of(self, request: pytest.FixtureRequest) -> EngineOf:
        def make(agent: Agent, seeded: bool = True) -> TransformersEngine:
            return TransformersEngine(agent, request.param, continuous=True)

        return make
