"""Numbers fetched from a device that goes on with what it is doing."""

from __future__ import annotations

import torch
from torch import Tensor


class Download:
    """Tensors as they are after all that the device has been asked so far, on their way here.

    An ordinary copy would come behind whatever the device has been asked by the time of reading.
    """

    def __init__(self, *tensors: Tensor) -> None:
        """All are on the same device."""
        device = tensors[0].device
        self._here = tuple(tensor.detach().to("cpu", non_blocking=True) for tensor in tensors)
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(device))  # the current device may be another

    def wait(self) -> tuple[Tensor, ...]:
        """In this machine's memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here
