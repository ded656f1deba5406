"""How much of a device an agent's vLLM engine takes."""

from __future__ import annotations

import torch

from hacrl.agents.engine_settings import MOST_MEMORY, VllmSettings
from hacrl.agents.footprint import Footprint
from hacrl.rollout.vllm.launch import CPU_CACHE_GIB, GIB, runs_on_cpu

# Besides weights, cache and what decoding needs: the CUDA context, graphs, and vLLM's trial pass over as many
# tokens as it computes at once, which grows with the model.
OVERHEAD = 3 * GIB
OVERHEAD_PER_BYTE = 1 / 8  # of weights


def is_beside(device: torch.device, settings: VllmSettings) -> bool:
    """Whether the engine is on its agent's device."""
    return settings.url is None and (settings.devices is None or (device.index or 0) in settings.devices)


def engine_bytes(footprint: Footprint, device: torch.device, settings: VllmSettings, total: int) -> int:
    """Of the ``total`` that its agent's device has.

    ``footprint``: the agent's, if it decoded as many responses at a time itself.
    """
    if not is_beside(device, settings):
        return 0
    if runs_on_cpu(device, settings):
        return int((settings.kv_cache_gib or CPU_CACHE_GIB) * GIB) + footprint.weights
    held = footprint.weights + OVERHEAD + int(OVERHEAD_PER_BYTE * footprint.weights)
    given = settings.kv_cache_gib * GIB if settings.kv_cache_gib is not None else None
    cache = settings.engine_args.get("kv_cache_memory_bytes", given)
    if cache is not None:  # then vLLM takes no share
        return int(cache) + held
    share = settings.engine_args.get("gpu_memory_utilization", settings.memory)
    if share is not None:
        return int(share * total)
    return min(held + footprint.cache + footprint.decoding, int(MOST_MEMORY * total))
