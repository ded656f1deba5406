"""AdamW for 16-bit weights, with float32 masters and optimizer state that can be offloaded.

A step of a usual learning rate is smaller than the distance between neighbouring bfloat16 numbers, so 16-bit
weights would not move. Each parameter below float32 therefore has a float32 master copy: gradients are summed
for it in float32, AdamW updates it, and the parameter is the master, rounded. A float32 parameter is its own
master.

Masters and moments, 12 bytes per 16-bit weight, are needed only in the update. They can be offloaded while
the agent does not learn (:meth:`MasterWeightAdamW.offload`), or always (:meth:`MasterWeightAdamW.stream`):
then an update streams them through the device block by block. Gradient sums, 4 more bytes per weight, can be
offloaded as well. The numbers do not depend on any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hacrl.errors import TrainingError
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.training import optimizer_block
from hacrl.training.gradients import GradientSums, OffloadedGradientSums
from hacrl.training.offload import HostAllocator, HostBuffers, Transfers
from hacrl.training.optimizer_block import OptimizerBlock, state_bytes, weight_blocks
from hacrl.training.tensor_files import TensorStream

STREAMED_BLOCKS = 2  # on the device while an update streams: one is offloaded while the next is reloaded


class MasterWeightAdamW:
    """AdamW over float32 masters, in blocks.

    ``offload_to``: offload each block's masters as soon as they are made, so that the device never holds all
    of them.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        offload_to: Transfers | None = None,
    ) -> None:
        self._host_allocator: HostAllocator | None = None  # one for all blocks
        self._host_bytes = sum(map(state_bytes, parameters))
        self.blocks: list[OptimizerBlock] = []
        for weights in weight_blocks(parameters):
            self.blocks.append(OptimizerBlock(weights, lr, betas, weight_decay))
            if offload_to is not None:
                self.blocks[-1].offload(offload_to, self._host_buffers(offload_to))
                if len(self.blocks) >= STREAMED_BLOCKS:
                    self.blocks[-STREAMED_BLOCKS].wait()
        self._weights = [weight for block in self.blocks for weight in block.weights]
        self._sums = GradientSums(self._weights)
        self._hooks: list[RemovableHandle] = []
        self._stream_through: Transfers | None = None
        self._blocks_updated = 0  # of a streamed update under way

    @property
    def is_streaming(self) -> bool:
        """Whether masters and moments are on the device only in updates."""
        return self._stream_through is not None

    @property
    def masters(self) -> list[Tensor]:
        """The float32 numbers that are trained, in the order of the parameters."""
        return [weight.master for weight in self._weights]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradient sums of the update under way, in the order of the parameters."""
        return [weight.gradient for weight in self._weights]

    @torch.no_grad()
    def sampled_gradients(self, most: int) -> Tensor:
        """Return up to ``most`` evenly spaced numbers of the gradient sums so far."""
        return self._sums.sampled(most)

    def summed_gradients(self) -> list[Tensor | None]:
        """Return this process's part of the gradient sums of the update under way, as they are, not copied.

        None: no pass has reached a weight. Raise TrainingError if the sums are offloaded between passes.
        """
        if isinstance(self._sums, OffloadedGradientSums):
            raise TrainingError(
                "gradients cannot be compared while their sums are offloaded between passes, and the method "
                "compares them; set learning.offload to weights, stream or less, or use another method"
            )
        return list(self.gradients)

    def set_learning_rate(self, lr: float) -> None:
        """Use another learning rate from the next update on."""
        for block in self.blocks:
            block.set_learning_rate(lr)

    def zero_gradients(self) -> None:
        """Begin an update: until :meth:`end_update`, sum gradients of 16-bit parameters in float32."""
        self.end_update()
        self._check_consistent()
        self.reload()
        self._blocks_updated = 0
        self._sums.begin_update()
        for weight in self._weights:
            if not weight.is_own_master:
                hook = weight.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, weight=weight: self._sums.add(weight)
                )
                self._hooks.append(hook)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients down to ``max_norm``; return their norm before."""
        norm = self._sums.norm()
        self._sums.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return float(norm)

    def step(self) -> None:
        """Update the masters, then round them into the parameters."""
        if self._stream_through is not None:
            self._streamed_step(self._stream_through)
        else:
            self.reload()
            for block in self.blocks:
                block.step()
        self.end_update()

    def _streamed_step(self, transfers: Transfers) -> None:
        """Reload, update and offload block after block; a block is reloaded while the one before offloads.

        Python runs ahead of the device and would allocate the memory of all blocks at once, so it waits until
        earlier blocks' memory is free. An interrupted update continues with the first block not yet updated.
        """
        on_device: deque[OptimizerBlock] = deque()  # or being offloaded
        most = STREAMED_BLOCKS * optimizer_block.BLOCK_BYTES
        while self._blocks_updated < len(self.blocks):
            block = self.blocks[self._blocks_updated]
            while on_device and sum(b.state_bytes for b in (*on_device, block)) > most:
                on_device.popleft().wait()
            self._reload_block(block)
            self._sums.prepare(block.weights)
            block.step()
            self._blocks_updated += 1
            block.offload(transfers, self._host_buffers(transfers))
            self._sums.discard(block.weights)
            on_device.append(block)

    def _reload_block(self, block: OptimizerBlock) -> None:
        """Start to reload the block. If memory runs out, retry once after all other blocks are offloaded."""
        try:
            self._start_reload(block)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.wait()
            free_failed_attempt(error, block.weights[0].parameter.device)
            self._start_reload(block)

    def _start_reload(self, block: OptimizerBlock) -> None:
        block.reload()
        self._sums.reload(block.weights)

    def stream(self, transfers: Transfers, offload_gradients: bool = False) -> None:
        """From now on keep masters and moments offloaded, and stream them through the device in updates.

        ``offload_gradients``: keep gradient sums offloaded between backward passes as well.
        """
        self._stream_through = transfers
        if offload_gradients and not isinstance(self._sums, OffloadedGradientSums):
            self._sums = OffloadedGradientSums(self._weights, transfers)

    def offload(self, transfers: Transfers) -> None:
        """Start to offload masters and moments, and free gradients; between updates only.

        A parameter that is its own master stays on the device.
        """
        self.end_update()
        self._sums.free()
        for block in self.blocks:
            block.offload(transfers, self._host_buffers(transfers))

    def reload(self) -> None:
        """Start to reload offloaded state that does not stream; :meth:`step` waits for it."""
        if not self.is_streaming:
            for block in self.blocks:
                block.reload()

    def wait(self) -> None:
        """Return when all copies of masters, moments and gradient sums are finished."""
        for block in self.blocks:
            block.wait()
        self._sums.wait()

    def tensors(self) -> dict[str, Tensor]:
        """Return masters and moments by weight number, wherever they are: all that a resumed run needs."""
        self._check_consistent()
        self.wait()
        return {name: value for block in self.blocks for name, value in block.tensors()}

    def tensor_stream(self) -> TensorStream:
        """Return the same, to be read one by one, in the order of a file."""
        return TensorStream.of(self.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensors` returned, and round the masters into the parameters.

        State that was offloaded is offloaded again afterwards.
        """
        self._blocks_updated = 0
        for block in self.blocks:
            block.load_tensors(tensors)
            if self.is_streaming:
                block.wait()  # the next block needs its device memory

    def end_update(self) -> None:
        """Stop summing gradients: between updates, other code may use the parameters' gradients."""
        while self._hooks:
            self._hooks.pop().remove()

    def _check_consistent(self) -> None:
        """Raise if an interrupted update has changed some of the weights and not the others."""
        if 0 < self._blocks_updated < len(self.blocks):
            raise TrainingError(
                f"memory ran out in the middle of an update: {self._blocks_updated} of {len(self.blocks)} "
                "blocks of the weights were updated. Resume from the last checkpoint (hacrl resume) with "
                "more free memory"
            )

    def _host_buffers(self, transfers: Transfers) -> HostBuffers:
        self._host_allocator = self._host_allocator or HostAllocator(
            transfers.allocate_host, self._host_bytes
        )
        return self._host_allocator.buffers_like
