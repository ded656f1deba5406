"""What leaves a device comes back as it was: no number of a run changes. Here the device is the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hacrl.agents.agent import Agent
from hacrl.algorithms.methods import make_method
from hacrl.algorithms.settings import GspoSettings
from hacrl.errors import TrainingError
from hacrl.learning.learner import Learner
from hacrl.learning.offload import Luggage, places_like
from hacrl.learning.optimizer import MasterWeightAdamW
from hacrl.learning.residency import Residency
from hacrl.learning.settings import LearningSettings, OffloadLevel
from tests.learning.handmade import SAMPLING, largest_difference, sample, weights
from tests.support.faults import out_of_memory
from tests.support.late_transfers import LateTransfers
from tests.support.tiny import char_agent

CPU = torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _rows_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is made to run out by the size of padded rows."""
    monkeypatch.setattr("hacrl.agents.logprobs.WORTH_PACKING", 0.0)


def transfers() -> LateTransfers:
    return LateTransfers(CPU)


# --- places in the machine's memory ---


def test_places_have_the_shape_and_strides_of_what_goes_there() -> None:
    tensors = [
        torch.zeros(3, 5),
        torch.zeros(4, 6).t(),
        torch.zeros(7, dtype=HALF),
        torch.zeros(0),
        torch.zeros(()),
    ]
    places = places_like(tensors, lambda size: torch.full((size,), 255, dtype=torch.uint8))
    for tensor, place in zip(tensors, places, strict=True):
        assert (place.shape, place.stride(), place.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    for number, place in enumerate(places):
        place.fill_(number)
    assert [set(place.flatten().tolist()) for place in places] == [{0.0}, {1.0}, {2.0}, set(), {4.0}]  # apart


def test_pieces_are_powers_of_two_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hacrl.learning.offload.CHUNK", 4096)
    asked: list[int] = []

    def allocate(size: int) -> Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    # in bytes, each a multiple of 512: 5120, 2048, 1536, 1024, 512. The largest gets 8192, where 3072 are
    # left; 2048 go there. 1536 do not, and 3072 are still to come: 4096 for them. 1024 go to the first, 512
    # to the second
    places_like([torch.empty(size // 4) for size in (1024, 1536, 5120, 400, 2048)], allocate)
    assert asked == [8192, 4096]


# --- tensors that travel ---


def test_a_tensor_stays_itself_and_keeps_its_numbers() -> None:
    move = transfers()
    luggage = Luggage(move)
    parameter, moment = nn.Parameter(torch.arange(6.0).view(2, 3)), torch.full((4,), 0.5)
    home = parameter.data_ptr()
    for trip in range(3):
        luggage.leave([parameter, moment])
        luggage.leave([parameter, moment])  # is away already
        assert parameter.isnan().all()  # nobody has waited yet
        luggage.wait()
        assert parameter.data_ptr() != home
        assert parameter.tolist() == [[0 + trip, 1 + trip, 2 + trip], [3 + trip, 4 + trip, 5 + trip]]
        luggage.come_back()
        luggage.come_back()
        assert parameter.isnan().all()
        luggage.ready()
        assert moment.tolist() == [0.5] * 4
        with torch.no_grad():
            parameter += 1  # work
        assert (parameter.is_leaf, parameter.requires_grad) == (True, True)
    assert move.pieces == [1024]  # two places of 512 bytes, used every time
    assert luggage.host_bytes == 1024
    assert move.moves == ["leave", "come_back"] * 3


def test_trips_without_a_wait_in_between_are_in_order() -> None:
    luggage, value = Luggage(transfers()), torch.tensor([1.0, 2.0])
    for _ in range(3):
        luggage.leave([value])
        luggage.come_back()
    luggage.leave([value])
    luggage.wait()
    assert value.tolist() == [1.0, 2.0]


def test_without_room_all_stay_away_and_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    luggage, tensors = Luggage(transfers()), [torch.tensor([1.0]), torch.tensor([2.0])]
    luggage.leave(tensors)
    luggage.wait()
    made = []
    real = torch.empty_strided

    def full(*arguments, **options) -> Tensor:
        if made:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(1)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", full)
        with pytest.raises(torch.OutOfMemoryError):
            luggage.come_back()
    assert luggage.is_away
    assert [tensor.item() for tensor in tensors] == [1.0, 2.0]
    luggage.come_back()
    luggage.ready()
    assert [tensor.item() for tensor in tensors] == [1.0, 2.0]


# --- an optimizer ---


def parameters(dtypes: Sequence[torch.dtype]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype)) for dtype in dtypes]


def update(optimizer: MasterWeightAdamW, given: Sequence[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_gradients()
    for value in given:
        gradient = torch.randn(5, 3, generator=generator).to(value.dtype)
        (value * gradient).sum().backward()
    optimizer.clip_gradients(1.0)
    optimizer.step()


def adamw(given: Sequence[Tensor]) -> MasterWeightAdamW:
    return MasterWeightAdamW(given, 1e-2, (0.9, 0.999), 0.1)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("dtypes", [(HALF, HALF), (FULL, FULL), (HALF, FULL)], ids=str)
def test_updates_are_the_same_wherever_the_optimizer_was_in_between(dtypes) -> None:
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    for seed in range(4):
        optimizer.offload(move)
        # 15 numbers each: masters of bfloat16 from the start, moments of all from the first update on
        masters = 60 * dtypes.count(HALF)
        assert move.away == masters + (120 * len(dtypes) if seed else 0)
        assert all(value.grad is None for value in (*moved, *optimizer.masters))
        if seed % 2:
            optimizer.bring_back()  # early, or by the update itself
        optimizer.zero_gradients()
        assert move.away == 0  # gradients are where masters are
        update(expected, plain, seed)
        update(optimizer, moved, seed)
        for one, other in zip(plain, moved, strict=True):
            assert torch.equal(one, other)
    assert_equal(optimizer.tensors(), expected.tensors())
    optimizer.offload(move)
    assert_equal(optimizer.tensors(), expected.tensors())
    assert len(move.pieces) == (1 if dtypes == (FULL, FULL) else 2)  # masters' and moments', allocated once


@pytest.mark.parametrize("dtypes", [(HALF, FULL)], ids=str)
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_state_is_loaded_into_an_optimizer_that_is_away(dtypes, trained_before: bool) -> None:
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    for seed in range(2):
        update(expected, plain, seed)
    if trained_before:
        update(optimizer, moved, 7)
    optimizer.offload(move)
    optimizer.load_tensors({name: value.clone() for name, value in expected.tensors().items()})
    assert move.away == 60 + 2 * 120  # one master, two pairs of moments
    assert_equal(optimizer.tensors(), expected.tensors())
    update(expected, plain, 3)
    update(optimizer, moved, 3)
    assert_equal(optimizer.tensors(), expected.tensors())
    for one, other in zip(plain, moved, strict=True):
        assert torch.equal(one, other)


# --- an optimizer that streams ---


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of 15 numbers with masters, 360 bytes, in a piece."""
    monkeypatch.setattr("hacrl.learning.optimizer_piece.PIECE", 400)


@pytest.mark.usefixtures("small_pieces")
def test_neighbours_are_in_a_piece_together() -> None:
    given = parameters((HALF, HALF, FULL, HALF, FULL, FULL, FULL))
    wide = nn.Parameter(torch.zeros(500, dtype=HALF))
    numbers = [[weight.number for weight in piece.weights] for piece in adamw([*given, wide]).pieces]
    # bytes: 180, 180, 120, 180, 120, 120, 120, 6000
    assert numbers == [[0, 1], [2, 3], [4, 5, 6], [7]]


class Counting(LateTransfers):
    """The most bytes that were not away at any time, of those that had been."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.most_here = 0
        self._all = 0

    def leave(self, copies, after):
        copying = super().leave(copies, after)
        self._all = max(self._all, self.away)
        return copying

    def come_back(self, copies, after):
        copying = super().come_back(copies, after)
        self.most_here = max(self.most_here, self._all - self.away)
        return copying


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtypes", [(HALF,) * 9, (FULL,) * 8, (HALF, FULL) * 4], ids=len)
def test_updates_that_stream_are_the_same(dtypes) -> None:
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), Counting()
    optimizer.offload(move)
    optimizer.stream_through(move)
    for seed in range(4):
        update(expected, plain, seed)
        update(optimizer, moved, seed)
        for one, other in zip(plain, moved, strict=True):
            assert torch.equal(one, other)
        assert move.away == 60 * dtypes.count(HALF) + 120 * len(dtypes)
        optimizer.zero_gradients()  # as the next update does, and nothing comes for it
        assert move.away == 60 * dtypes.count(HALF) + 120 * len(dtypes)
    assert_equal(optimizer.tensors(), expected.tensors())
    assert 0 < move.most_here <= 400  # a piece; the one before may still be leaving


@pytest.mark.usefixtures("small_pieces")
def test_memory_is_asked_for_when_that_of_an_earlier_piece_is_free() -> None:
    """Nobody waits for copies on a device, so that all pieces would be there at once."""
    given = parameters((HALF,) * 10)
    optimizer, move = adamw(given), transfers()
    optimizer.offload(move)
    optimizer.stream_through(move)
    update(optimizer, given, 0)
    done: list[list[bool]] = []  # whether a copy of each piece is under way
    real = move.come_back

    def asked(copies, after):
        done.append([bool(piece.luggage._copying.copies) for piece in optimizer.pieces])
        return real(copies, after)

    move.come_back = asked
    optimizer.wait()
    optimizer.zero_gradients()
    optimizer.step()
    # the third is asked for when the first has left and the second is leaving, and so on
    assert len(done) == 5
    assert done[2] == [False, True, False, False, False]
    assert done[3] == [False, False, True, False, False]
    assert done[4] == [False, False, False, True, False]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_state_is_loaded_into_an_optimizer_that_streams(trained_before: bool) -> None:
    dtypes = (HALF, FULL) * 4
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), Counting()
    for seed in range(2):
        update(expected, plain, seed)
    optimizer.offload(move)
    optimizer.stream_through(move)
    if trained_before:
        update(optimizer, moved, 7)
    optimizer.load_tensors({name: value.clone() for name, value in expected.tensors().items()})
    assert move.away == 4 * 60 + 8 * 120
    assert move.most_here <= 400  # a piece at a time
    assert_equal(optimizer.tensors(), expected.tensors())
    update(expected, plain, 3)
    update(optimizer, moved, 3)
    assert_equal(optimizer.tensors(), expected.tensors())


@pytest.mark.usefixtures("small_pieces")
def test_pieces_share_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tensors with a master and two moments each, all of 512 bytes with what is left free."""
    monkeypatch.setattr("hacrl.learning.offload.CHUNK", 4096)
    given = parameters((HALF,) * 10)
    optimizer, move = adamw(given), transfers()
    optimizer.stream_through(move)
    for seed in range(3):
        update(optimizer, given, seed)
    # 30 places; 10 * 180 bytes are expected, so that pieces of 2048, then what is asked for
    assert sum(move.pieces) <= 30 * 512 + 4096


def full_at(move: LateTransfers, *attempts: int):
    """A device without room for some of what is to come back, counted from one."""
    real, asked = move.come_back, []

    def come_back(copies, after):
        asked.append(1)
        if len(asked) in attempts:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(copies, after)

    return come_back


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_without_room_comes_when_the_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 8), parameters((HALF,) * 8)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    optimizer.offload(move)
    optimizer.stream_through(move)
    with monkeypatch.context() as patch:
        patch.setattr(move, "come_back", full_at(move, 3))
        update(optimizer, moved, 0)
    update(expected, plain, 0)
    assert_equal(optimizer.tensors(), expected.tensors())


@pytest.mark.usefixtures("small_pieces")
def test_an_update_that_ends_in_the_middle_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 8), parameters((HALF,) * 8)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    optimizer.offload(move)
    optimizer.stream_through(move)
    before = {name: value.clone() for name, value in optimizer.tensors().items()}
    with monkeypatch.context() as patch:
        patch.setattr(move, "come_back", full_at(move, 3, 4))
        with pytest.raises(torch.OutOfMemoryError):
            update(optimizer, moved, 0)
    for use in (optimizer.tensors, optimizer.zero_gradients):
        with pytest.raises(TrainingError, match=r"middle of an update: 2 of 4 parts .*hacrl resume"):
            use()
    optimizer.step()  # there is room again: it goes on where it was
    update(expected, plain, 0)
    assert_equal(optimizer.tensors(), expected.tensors())
    with monkeypatch.context() as patch:
        patch.setattr(move, "come_back", full_at(move, 3, 4))
        with pytest.raises(torch.OutOfMemoryError):
            update(optimizer, moved, 1)
    optimizer.load_tensors(before)  # as a resumed run does
    assert optimizer.tensors().keys() >= before.keys()
    update(optimizer, moved, 0)
    assert_equal(optimizer.tensors(), expected.tensors())


def test_a_failed_update_keeps_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parameters((HALF, HALF))
    optimizer = adamw(given)
    optimizer.zero_gradients()

    def full(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optimizer.pieces[0].adamw, "step", full)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    optimizer.offload(transfers())
    assert all(value.grad is None for value in (*given, *optimizer.masters))


# --- whose turn it is ---


def learner(agent: Agent) -> Learner:
    method = make_method(GspoSettings(clip_low=0.5, clip_high=0.5))
    return Learner(agent, method, LearningSettings(lr=1e-2, micro_batch_tokens=128), SAMPLING)


def half_agent(name: str) -> Agent:
    agent = char_agent(name)
    agent.model.to(HALF)
    return agent


class Shared:
    """Agents in bfloat16 that share a device and have learnt once, so that there are moments."""

    def __init__(self, level: OffloadLevel, names: Sequence[str] = ("ada", "bob")) -> None:
        self.move = transfers()
        self.residency = Residency(make_transfers=lambda _: self.move)
        self.learners = {name: learner(half_agent(name)) for name in names}
        self.count = sum(p.numel() for p in self.learners["ada"].agent.model.parameters())
        self.samples = [sample(self.learners["ada"].agent, i, 0.95, 1.0) for i in range(4)]
        for one in self.learners.values():
            one.learn(self.samples, 1, seed=0)
            self.residency.add(one.agent, one, level)

    def learn(self, name: str) -> None:
        self.residency.to_learn(name)
        self.learners[name].learn(self.samples, 2, seed=1)

    @property
    def away_per_parameter(self) -> float:
        return self.move.away / self.count


def test_optimizers_are_away_unless_their_agent_learns() -> None:
    shared = Shared("optimizer")
    assert shared.away_per_parameter == 0
    shared.residency.to_generate("ada")
    assert shared.away_per_parameter == 2 * 12  # a master and two moments, float32
    shared.residency.to_generate("bob")
    assert shared.away_per_parameter == 2 * 12
    shared.residency.to_learn("ada")
    assert shared.away_per_parameter == 12
    shared.residency.to_learn("bob")
    assert shared.away_per_parameter == 12
    shared.residency.everyone_home()
    assert shared.away_per_parameter == 12  # only weights are anybody's business


def test_weights_of_agents_not_at_work_are_away_if_asked_for() -> None:
    shared = Shared("all", ("ada", "bob", "cyd"))
    shared.residency.to_generate("ada")
    assert shared.away_per_parameter == 3 * 12 + 2 * 2
    shared.residency.to_learn("bob")
    assert shared.away_per_parameter == 3 * 12 + 2 * 2  # his optimizer comes for the update alone
    shared.learn("bob")
    assert shared.away_per_parameter == 3 * 12 + 2 * 2
    shared.residency.leave("bob")
    assert shared.away_per_parameter == 3 * 12 + 3 * 2
    shared.residency.everyone_home()
    assert shared.away_per_parameter == 3 * 12
    for one in shared.learners.values():
        assert all(parameter.isfinite().all() for parameter in one.agent.model.parameters())


def test_agents_that_were_not_added_and_other_devices_are_left_alone() -> None:
    moves: list[LateTransfers] = []

    def fresh(_: torch.device) -> LateTransfers:
        moves.append(transfers())
        return moves[-1]

    residency = Residency(make_transfers=fresh)
    ada, bob = learner(half_agent("ada")), learner(half_agent("bob"))
    residency.add(ada.agent, ada, "never")
    residency.to_generate("ada")
    assert moves == []
    residency.add(ada.agent, ada, "all")
    elsewhere = type("Elsewhere", (Agent,), {"device": torch.device("meta")})
    bob.agent.__class__ = elsewhere  # as on another device
    residency.add(bob.agent, bob, "all")
    residency.leave("bob")
    before = moves[1].away
    residency.to_learn("ada")
    assert moves[0].away == 4 * sum(p.numel() for p in ada.agent.model.parameters())  # her masters
    assert moves[1].away == before > 0


def test_an_optimizer_that_streams_is_away_but_for_the_update() -> None:
    shared = Shared("stream")
    shared.residency.to_generate("ada")
    assert shared.away_per_parameter == 2 * 12
    shared.residency.to_learn("ada")
    assert shared.away_per_parameter == 2 * 12
    seen = []
    (piece,) = shared.learners["ada"].optimizer.pieces
    hook = piece.adamw.register_step_pre_hook(lambda *_: seen.append(shared.away_per_parameter))
    shared.learn("ada")
    hook.remove()
    assert seen == [12, 12]  # two updates
    assert shared.away_per_parameter == 2 * 12


@pytest.mark.parametrize("level", ["optimizer", "stream", "all"])
def test_agents_that_take_turns_learn_the_same(level: OffloadLevel) -> None:
    apart, shared = Shared("never"), Shared(level)
    for name in ("ada", "bob", "bob", "ada"):
        apart.learn(name)
        shared.learn(name)
        shared.residency.to_generate(name)
    shared.residency.everyone_home()
    for name, one in shared.learners.items():
        assert_equal(weights(one.agent), weights(apart.learners[name].agent))
        assert_equal(one.optimizer.tensors(), apart.learners[name].optimizer.tensors())
    start = Shared("never").learners["ada"].agent
    assert largest_difference(weights(shared.learners["ada"].agent), weights(start)) > 1e-2


def test_memory_that_runs_out_in_learning_costs_the_same_attempts() -> None:
    """The samples have 16, 10, 5 and 4 tokens; only one or two of them fit at once."""
    found = []
    for shared in (Shared("never"), Shared("all")):
        shared.residency.to_generate("ada")
        shared.residency.to_learn("bob")
        bob = shared.learners["bob"]
        with out_of_memory(bob.agent.model, lambda ids: ids.numel() > 20) as failed:
            stats = bob.learn(shared.samples, 1, seed=1)
        assert (stats.oom_retries, stats.updates) == (len(failed), 1)
        assert failed
        shared.residency.leave("bob")
        shared.residency.everyone_home()
        found.append((bob.optimizer.tensors(), weights(bob.agent), bob.state_dict()))
    (one, its_weights, state), (other, other_weights, other_state) = found
    assert_equal(one, other)
    assert_equal(its_weights, other_weights)
    assert state == other_state


def test_what_cannot_come_back_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared("optimizer")
    shared.residency.to_generate("ada")

    def full(*_, **__) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", full)
        with pytest.raises(TrainingError, match=r"agent 'ada': its optimizer did not fit .*offload=stream"):
            shared.residency.to_learn("ada")
    shared.learn("ada")  # nothing is lost for a process that makes room


def test_an_agent_can_be_saved_while_its_weights_are_away(tmp_path: Path) -> None:
    """As a callback may do; the places of weights share pieces of memory, which tied weights do too."""
    shared = Shared("all")
    expected = weights(shared.learners["ada"].agent)
    shared.residency.leave("ada")
    shared.learners["ada"].agent.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(expected)
    assert_equal(saved, expected)
