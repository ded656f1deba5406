"""``engine: transformers``: the learner's own model generates."""

from __future__ import annotations

from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.kinds import EngineKind, EngineSpec


class TransformersKind(EngineKind):
    """Decodes with the learner's weights; needs memory for the KV cache only."""

    shares_weights = True

    def make(self, spec: EngineSpec) -> TransformersEngine:
        """Return an engine that samples with the agent's model. Raise ModelError if it cannot generate."""
        rollout = spec.rollout
        engine = TransformersEngine(spec.agent, rollout.max_batch, compiles=spec.compiles)
        engine.check_generation()
        return engine
