"""``engine: vllm``: vLLM generates, in a child process, in a server that hacrl starts, or at a URL."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hacrl.config.schema import AgentSettings, RolloutSettings
from hacrl.engines.kinds import EngineKind, EngineSpec
from hacrl.engines.vllm.checks import PROCESSOR_LIMIT, check_vllm, processor_limit
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.engines.vllm.launch import (
    decoding_slots,
    engine_bytes,
    make_vllm_engines,
    runs_on_cpu,
    sleeps,
)
from hacrl.engines.vllm.several import VllmEngines
from hacrl.errors import ConfigError
from hacrl.models.footprint import Footprint


class VllmKind(EngineKind):
    """An engine with weights of its own, which the learner sends after every step."""

    takes_gpu_share = True
    samples_beside_learning = True

    def make(self, spec: EngineSpec) -> VllmEngine | VllmEngines:
        """Return an engine that starts at its first use."""
        name, settings = spec.agent.name, spec.settings.vllm
        most = settings.engine_args.get("max_model_len")
        if isinstance(most, int) and 0 < most < spec.max_length:
            raise ConfigError(
                f"agents.{name}.vllm.engine_args.max_model_len={most}, but the longest prompt and a full "
                f"response are {spec.max_length} tokens; raise it or leave it out"
            )
        reads_text = bool(spec.rollout.stop)
        return make_vllm_engines(
            spec.agent, settings, spec.probes, spec.max_length, spec.folder, spec.seed, reads_text
        )

    def check(self, settings: AgentSettings) -> None:
        """Check versions, devices, and the server if there is one."""
        parallel = settings.vllm.engine_args.get("data_parallel_size", 1)
        if parallel != 1:
            raise ConfigError(
                f"agents.{settings.name}.vllm.engine_args.data_parallel_size={parallel}: vLLM's own data "
                "parallel engines take no weights from a learner that is none of them; set "
                f"agents.{settings.name}.vllm.engines={parallel} instead"
            )
        check_vllm(settings.name, settings.vllm)

    def check_together(self, agents: Sequence[AgentSettings]) -> None:
        """Refuse two engines with one server: it has the weights of one agent, and serves it once."""
        urls = [url.rstrip("/") for agent in agents for url in agent.vllm.urls]
        for url in urls:
            if urls.count(url) > 1:
                raise ConfigError(
                    f"agents: vllm.url {url} is named twice; every engine needs a server of its own"
                )

    def notes(self, agents: Sequence[AgentSettings], devices: dict[str, torch.device]) -> tuple[str, ...]:
        """Warn of a limit on GPU processors under which vLLM has computed wrong numbers."""
        names = [
            agent.name
            for agent in agents
            if not agent.vllm.urls and not runs_on_cpu(devices[agent.name], agent.vllm)
        ]
        limit = processor_limit()
        if not names or limit is None:
            return ()
        # A note, not an error: other GPUs and versions may compute as they should.
        return (
            f"{PROCESSOR_LIMIT}={limit} would limit the vLLM engines of {', '.join(names)}. On an H200, "
            "vLLM's log-probabilities were wrong by nats under such a limit, and responses that disagree "
            "with the learner are refused: unset it",
        )

    def sequences_at_once(self, settings: AgentSettings, rollout: RolloutSettings) -> int:
        """Return vLLM's ``max_num_seqs``, of one engine."""
        return decoding_slots(settings.vllm)

    def longest_sequence(self, settings: AgentSettings) -> int:
        """Return vLLM's ``max_model_len`` if it is set: the KV cache must hold one such sequence."""
        return int(settings.vllm.engine_args.get("max_model_len") or 0)

    def memory(
        self, footprint: Footprint, settings: AgentSettings, device: torch.device, available: int
    ) -> int:
        """Return what the engines on the agent's device take of it."""
        return sum(engine_bytes(footprint, device, one, available) for one in settings.vllm.each())

    def gives_memory_back(self, settings: AgentSettings, device: torch.device) -> bool:
        """Return whether the engines on the agent's device sleep while agents learn."""
        return any(sleeps(device, one) for one in settings.vllm.each())
