"""An engine with a copy of the model keeps the contract of engines, whichever way it decodes."""

from __future__ import annotations

import pytest

from hacrl.engines.hf.detached import DetachedEngine
from hacrl.models.agent import Agent
from tests.engines.engine_contract import EngineContract, EngineOf
from tests.support.engines import probe_prompts


class TestDetachedEngine(EngineContract):
    @pytest.fixture(params=[False, True], ids=["in step", "continuously"])
    def engine_of(self, request: pytest.FixtureRequest) -> EngineOf:
        def make(agent: Agent, seeded: bool = True) -> DetachedEngine:
            return DetachedEngine(agent, probe_prompts(agent), max_batch=7, continuous=request.param)

        return make
