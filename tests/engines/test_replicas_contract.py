"""Replicas in processes of their own keep the contract of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hacrl.engines.replicas.engine import ReplicaEngine
from hacrl.engines.replicas.fleet import Fleet
from hacrl.models.agent import Agent
from tests.engines.engine_contract import EngineContract, EngineOf
from tests.support.engines import engine_agent
from tests.support.replicas import replica_engine


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Fleet]]:
    """Two replicas for all tests: all agents have the same shape."""
    folder = tmp_path_factory.mktemp("replicas")
    engine = replica_engine(engine_agent(), folder)
    engine.sync()
    yield folder, engine._fleet
    engine.close()


class TestReplicaEngine(EngineContract):
    @pytest.fixture
    def engine_of(self, started: tuple[Path, Fleet]) -> EngineOf:
        def make(agent: Agent, seeded: bool = True) -> ReplicaEngine:
            folder, fleet = started
            engine = replica_engine(agent, folder, max_batch=7)
            engine._fleet = fleet
            return engine

        return make
