"""AdamW that can train 16-bit weights.

A step of a usual learning rate is smaller than the distance between neighbouring bfloat16 numbers, so
16-bit weights would not move. Parameters below float32 therefore get a float32 master copy: gradients
are summed into it, the optimizer moves it, and the parameter is its rounded image. A float32 parameter
is its own master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class MasterWeightAdamW:
    """AdamW over float32 masters; 12 bytes per parameter for 16-bit weights besides their gradient."""

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self._pairs = [(parameter, _master(parameter)) for parameter in parameters]
        self._masters = [master for _, master in self._pairs]
        self._hooks: list[RemovableHandle] = []
        on_gpu = all(master.is_cuda for master in self._masters)  # elsewhere it would only round differently
        self.adamw = torch.optim.AdamW(
            self._masters, lr=lr, betas=betas, weight_decay=weight_decay, fused=on_gpu or None
        )

    def zero_gradients(self) -> None:
        """Begin an update: until its step, gradients of the parameters are handed to their masters.

        Zeros, not None: an update without any signal must move the weights as if all were computed.
        """
        self.end_update()
        for parameter, master in self._pairs:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad.zero_()
            if parameter is not master:
                parameter.grad = None
                hook = partial(_hand_over, master)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients down to ``max_norm``; returns their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self._masters, max_norm))

    @torch.no_grad()
    def step(self) -> None:
        """Move the masters, then round them into the parameters."""
        self.adamw.step()
        for parameter, master in self._pairs:
            if parameter is not master:
                parameter.copy_(master)
        self.end_update()

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments, numbered in the order of the parameters: all that a resumed run needs."""
        found = {}
        for number, master in enumerate(self._masters):
            found[f"{number}.master"] = master.detach()
            for key, value in self.adamw.state.get(master, {}).items():
                found[f"{number}.{key}"] = value
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensors` gave; parameters become the masters' rounded images."""
        for number, (parameter, master) in enumerate(self._pairs):
            master.copy_(tensors[f"{number}.master"])
            if parameter is not master:
                parameter.copy_(master)
            prefix = f"{number}."
            state = {
                key.removeprefix(prefix): value
                for key, value in tensors.items()
                if key.startswith(prefix) and key != f"{number}.master"
            }
            if state:  # the count of steps lives on the CPU, moments where the master is
                self.adamw.state[master] = {
                    key: value.clone() if key == "step" else value.to(master.device, copy=True)
                    for key, value in state.items()
                }

    def end_update(self) -> None:
        """Between updates the parameters are anybody's, e.g. another optimizer's."""
        while self._hooks:
            self._hooks.pop().remove()


def _master(parameter: Tensor) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().to(torch.float32).requires_grad_()


def _hand_over(master: Tensor, parameter: Tensor) -> None:
    """Add the gradient of one backward pass to the master's, in float32, and free it at once."""
    assert master.grad is not None
    assert parameter.grad is not None
    master.grad.add_(parameter.grad)
    parameter.grad = None
