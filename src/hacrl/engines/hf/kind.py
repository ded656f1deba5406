"""``engine: transformers``: the learner's own model generates."""

from __future__ import annotations

from hacrl.engines.base import Engine
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.gathered import GatheredEngine
from hacrl.engines.kinds import EngineKind, EngineSpec
from hacrl.models.sharding import sharding_of


class TransformersKind(EngineKind):
    """Decodes with the learner's weights; needs memory for the KV cache only."""

    shares_weights = True

    def make(self, spec: EngineSpec) -> Engine:
        """Return an engine that samples with the agent's model, or with a whole copy of a sharded one.

        Raise ModelError if the model cannot generate; of a sharded one that shows before its first response.
        """
        rollout = spec.rollout
        if sharding_of(spec.agent.model) is not None:
            return GatheredEngine(spec.agent, spec.probes, rollout.max_batch, compiles=spec.compiles)
        engine = TransformersEngine(spec.agent, rollout.max_batch, compiles=spec.compiles)
        engine.check_generation()
        return engine
