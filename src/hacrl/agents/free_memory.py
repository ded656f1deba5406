"""What of a GPU's memory nobody uses."""

from __future__ import annotations

import torch


def unused_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free at the moment, and all there are. Asks the driver, waits for nothing.

    What torch has reserved for later is this process's, but nobody's now: learning will use it again.
    """
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
