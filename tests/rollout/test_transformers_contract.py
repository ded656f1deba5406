"""The transformers engine keeps the contract of engines."""

from __future__ import annotations

import pytest

from hacrl.agents.agent import Agent
from hacrl.rollout.transformers_engine import TransformersEngine
from tests.rollout.engine_contract import EngineContract, EngineOf


class TestTransformersEngine(EngineContract):
    @pytest.fixture
    def engine_of(self) -> EngineOf:
        def make(agent: Agent, seeded: bool = True) -> TransformersEngine:
            return TransformersEngine(agent)

        return make
