"""AdamW that can train 16-bit weights.

A step of a usual learning rate is smaller than the distance between neighbouring bfloat16 numbers, so
16-bit weights would not move. Parameters below float32 therefore get a float32 master copy: gradients
are summed for it, the optimizer moves it, and the parameter is its rounded image. A float32 parameter
is its own master.

Masters and moments, 12 bytes per 16-bit weight, are needed for the update alone, not by the passes before it.
They may be in the machine's memory while the agent is not learning (:meth:`MasterWeightAdamW.offload`), or
always (:meth:`MasterWeightAdamW.stream_through`): then an update takes them through the device, a piece after
the other. Sums of gradients, 4 bytes more, may be there as well. The numbers are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hacrl.errors import TrainingError
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.training import optimizer_block as optimizer_piece
from hacrl.training.gradients import AwaySums, Sums
from hacrl.training.offload import HostPlaces, Transfers
from hacrl.training.optimizer_block import Piece, in_pieces, moved_bytes

STREAMED_AT_ONCE = 2  # pieces on the device while updates stream: one leaves while the next one comes


class MasterWeightAdamW:
    """AdamW over float32 masters; 12 bytes per parameter for 16-bit weights besides their gradient."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        leaves: Transfers | None = None,
    ) -> None:
        """``leaves``: masters are sent away as they are made, so that never all of them are there."""
        self._places: HostPlaces | None = None
        self._expected = sum(map(moved_bytes, parameters))
        self.pieces: list[Piece] = []
        for weights in in_pieces(parameters):
            self.pieces.append(Piece(weights, lr, betas, weight_decay))
            if leaves is not None:
                self.pieces[-1].leave(leaves, self._host_places(leaves))
                if len(self.pieces) >= STREAMED_AT_ONCE:
                    self.pieces[-STREAMED_AT_ONCE].wait()
        self._weights = [weight for piece in self.pieces for weight in piece.weights]
        self._sums = Sums(self._weights)
        self._hooks: list[RemovableHandle] = []
        self._streams_through: Transfers | None = None
        self._updated = 0  # pieces of a streamed update under way

    @property
    def streams(self) -> bool:
        """Whether masters and moments are on the device for updates only."""
        return self._streams_through is not None

    @property
    def masters(self) -> list[Tensor]:
        """The float32 numbers that are trained, in the order of the parameters."""
        return [weight.master for weight in self._weights]

    @property
    def gradients(self) -> list[Tensor]:
        """Of the masters, since the update began."""
        return [weight.gradient for weight in self._weights]

    def zero_gradients(self) -> None:
        """Begin an update: until its step, gradients of 16-bit parameters are summed in float32."""
        self.end_update()
        self._check_whole()
        self.bring_back()
        self._updated = 0
        self._sums.begin()
        for weight in self._weights:
            if not weight.is_own_master:
                hook = weight.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, weight=weight: self._sums.add(weight)
                )
                self._hooks.append(hook)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients down to ``max_norm``; returns their norm before."""
        norm = self._sums.norm()
        self._sums.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return float(norm)

    def step(self) -> None:
        """Move the masters, then round them into the parameters."""
        if self._streams_through is not None:
            self._stream(self._streams_through)
        else:
            self.bring_back()
            for piece in self.pieces:
                piece.step()
        self.end_update()

    def _stream(self, transfers: Transfers) -> None:
        """Every piece comes, while the one before leaves, is updated, and leaves.

        Python runs ahead of the device and would ask for the memory of all pieces at once, so it waits until
        that of earlier ones is free. An update that was broken off goes on where it was.
        """
        there: deque[Piece] = deque()  # or leaving
        room = STREAMED_AT_ONCE * optimizer_piece.PIECE
        while self._updated < len(self.pieces):
            piece = self.pieces[self._updated]
            while there and sum(one.moved_bytes for one in (*there, piece)) > room:
                there.popleft().wait()
            self._bring_one(piece)
            self._sums.ready(piece.weights)
            piece.step()
            self._updated += 1
            piece.leave(transfers, self._host_places(transfers))
            self._sums.drop(piece.weights)
            there.append(piece)

    def _bring_one(self, piece: Piece) -> None:
        """If need be when everything else has left: an update must not end in the middle."""
        try:
            self._bring(piece)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.wait()
            free_failed_attempt(error, piece.weights[0].parameter.device)
            self._bring(piece)

    def _bring(self, piece: Piece) -> None:
        piece.come_back()
        self._sums.bring(piece.weights)

    def stream_through(self, transfers: Transfers, with_gradients: bool = False) -> None:
        """From now on masters and moments are in the machine's memory, and on the device for updates only.

        Sums of gradients as well, if asked for: but for updates and their turn in backward passes.
        """
        self._streams_through = transfers
        if with_gradients and not isinstance(self._sums, AwaySums):
            self._sums = AwaySums(self._weights, transfers)

    def offload(self, transfers: Transfers) -> None:
        """Begin to send masters and moments away, and let go of gradients; between updates only.

        A parameter that is its own master stays: it is a weight.
        """
        self.end_update()
        self._sums.let_go()
        for piece in self.pieces:
            piece.leave(transfers, self._host_places(transfers))

    def bring_back(self) -> None:
        """Begin to bring back what was sent away and does not stream; :meth:`step` waits for it."""
        if not self.streams:
            for piece in self.pieces:
                piece.come_back()

    def wait(self) -> None:
        """Until masters and moments are whole, wherever they are, and nothing else is on its way."""
        for piece in self.pieces:
            piece.wait()
        self._sums.wait()

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments, numbered in the order of the parameters: all that a resumed run needs.

        They are where they are now, on the device or away from it.
        """
        self._check_whole()
        self.wait()
        return {name: value for piece in self.pieces for name, value in piece.tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensors` gave; parameters become the masters' rounded images.

        What is away is away again afterwards.
        """
        self._updated = 0
        for piece in self.pieces:
            piece.load_tensors(tensors)
            if self.streams:
                piece.wait()  # before the next one needs its memory

    def end_update(self) -> None:
        """Between updates the parameters are anybody's, e.g. another optimizer's."""
        while self._hooks:
            self._hooks.pop().remove()

    def _check_whole(self) -> None:
        """Weights of which some have been updated and some have not are nobody's policy."""
        if 0 < self._updated < len(self.pieces):
            raise TrainingError(
                f"memory ran out in the middle of an update: {self._updated} of {len(self.pieces)} parts of "
                "the weights were updated. Go on from the last checkpoint (hacrl resume), with more room"
            )

    def _host_places(self, transfers: Transfers) -> HostPlaces:
        """One for all pieces, which share what they are given of the machine's memory."""
        self._places = self._places or HostPlaces(transfers.host_memory, self._expected)
        return self._places
