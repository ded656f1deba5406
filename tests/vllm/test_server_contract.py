"""A vLLM server keeps the contract of engines."""

from __future__ import annotations

import pytest

from hacrl.engines.vllm.engine import VllmEngine
from hacrl.models.agent import Agent
from tests.engines.engine_contract import EngineContract, EngineOf
from tests.vllm.conftest import Server

pytestmark = pytest.mark.vllm


class TestVllmServer(EngineContract):
    @pytest.fixture
    def engine_of(self, server: Server) -> EngineOf:
        def make(agent: Agent, seeded: bool = True) -> VllmEngine:
            return server.engine(agent, seeded=seeded)

        return make
