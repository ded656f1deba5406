"""AdamW that can train 16-bit weights.

A step of a usual learning rate is smaller than the distance between neighbouring bfloat16 numbers, so
16-bit weights would not move. Parameters below float32 therefore get a float32 master copy: gradients
are summed into it, the optimizer moves it, and the parameter is its rounded image. A float32 parameter
is its own master.

While the agent is not learning, masters and moments may be in the machine's memory instead of the device's
(:meth:`MasterWeightAdamW.offload`); what needs them brings them back, to the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hacrl.learning.offload import Luggage, Transfers


class MasterWeightAdamW:
    """AdamW over float32 masters; 12 bytes per parameter for 16-bit weights besides their gradient."""

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self._pairs = [(parameter, _master(parameter)) for parameter in parameters]
        self._masters = [master for _, master in self._pairs]
        self._hooks: list[RemovableHandle] = []
        self._homes = [master.device for master in self._masters]
        self._luggage: Luggage | None = None  # None: never sent away
        on_gpu = all(master.is_cuda for master in self._masters)  # elsewhere it would only round differently
        self._fused = on_gpu
        self.adamw = torch.optim.AdamW(
            self._masters, lr=lr, betas=betas, weight_decay=weight_decay, fused=on_gpu or None
        )

    def zero_gradients(self) -> None:
        """Begin an update: until its step, gradients of the parameters are handed to their masters.

        Zeros, not None: an update without any signal must move the weights as if all were computed.
        """
        self.end_update()
        self.bring_back()
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
        self.bring_back()
        if self._luggage is not None:
            self._luggage.ready()
        self.adamw.step()
        for parameter, master in self._pairs:
            if parameter is not master:
                parameter.copy_(master)
        self.end_update()

    def offload(self, transfers: Transfers) -> None:
        """Begin to send masters and moments away, and let go of gradients; between updates only.

        A parameter that is its own master stays: it is a weight.
        """
        if self._luggage is not None and self._luggage.is_away:
            return
        self.end_update()
        self._luggage = self._luggage or Luggage(transfers)
        for master in self._masters:
            master.grad = None
        self._luggage.leave(self._movable())

    def bring_back(self) -> None:
        """Begin to bring back what was sent away; :meth:`step` waits for it."""
        if self._luggage is not None:
            self._luggage.come_back()

    def wait(self) -> None:
        """Until masters and moments are whole, wherever they are."""
        if self._luggage is not None:
            self._luggage.wait()

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments, numbered in the order of the parameters: all that a resumed run needs.

        They are where they are now, on the device or away from it.
        """
        self.wait()
        found = {}
        for number, master in enumerate(self._masters):
            found[f"{number}.master"] = master.detach()
            for key, value in self.adamw.state.get(master, {}).items():
                found[f"{number}.{key}"] = value
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensors` gave; parameters become the masters' rounded images.

        What is away is away again afterwards.
        """
        away = self._luggage if self._luggage is not None and self._luggage.is_away else None
        self.bring_back()
        self.wait()
        for number, (parameter, master) in enumerate(self._pairs):
            master.copy_(tensors[f"{number}.master"])
            if parameter is not master:
                parameter.copy_(master)
            for state in self.adamw.state.get(master, {}).values():
                state.zero_()  # as before the first update, if that is what is restored
            prefix = f"{number}."
            for key, value in tensors.items():
                if key.startswith(prefix) and key != f"{number}.master":
                    self._load_state(number, key.removeprefix(prefix), value)
        if away is not None:
            away.leave(self._movable())

    def _load_state(self, number: int, key: str, value: Tensor) -> None:
        """Into the tensor that is there, if there is one: it may have a place to be sent to."""
        state, home = self.adamw.state[self._masters[number]], self._homes[number]
        if key in state:
            state[key].copy_(value)
        else:  # unlike the moments, the count of steps is on the CPU, unless one kernel does it all
            state[key] = value.to("cpu" if key == "step" and not self._fused else home, copy=True)

    def _movable(self) -> list[Tensor]:
        """Masters that are not weights themselves, and moments; counts of steps are not worth it."""
        found = [master for parameter, master in self._pairs if parameter is not master]
        for master in self._masters:
            state = self.adamw.state.get(master, {})
            found += [value for key, value in state.items() if key != "step"]
        return found

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
