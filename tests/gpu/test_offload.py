"""Tensors offloaded from a real GPU are reloaded unchanged, and their memory is free in between."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hacrl.config.load import build_config
from hacrl.config.schema import RunConfig
from hacrl.memory import estimate as memory
from hacrl.models.agent import Agent
from hacrl.runs.preflight import preflight
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, build_trainer
from hacrl.training.observer import Observer, Phase
from hacrl.training.offload import CudaTransfers, OffloadGroup
from hacrl.training.optimizer import MasterWeightAdamW
from tests.support.sevens import SevensTask
from tests.support.tiny import character_tokenizer, pair_tokenizer, tiny_llama, tiny_qwen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
GPU = torch.device(DEVICE, 0)
MIB = 2**20
STEPS = 3


def allocated(collect: bool = True) -> int:
    """Bytes of the GPU that tensors have asked for, when all is done; what they get is rounded up."""
    torch.cuda.synchronize()
    if collect:
        gc.collect()
    torch.empty(1, device=GPU)  # asked for memory, torch looks which copies out of it have ended
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def busy(seconds: float = 0.2) -> None:
    """Keep the stream busy, so that copies which do not wait for it run too early."""
    torch.cuda._sleep(int(seconds * 1e9))  # cycles; a GPU makes one to two of them in a nanosecond


# --- the mechanism ---


def test_copies_come_after_the_work_before_them_and_before_the_work_after_them() -> None:
    """Without waiting for each other, the streams would read and write too early."""
    group = OffloadGroup(CudaTransfers(GPU))
    value = torch.zeros(64 * MIB // 4, device=GPU)
    for trip in range(1, 6):
        busy()
        value += 1  # still to come when the copy is asked for
        group.offload([value])
        assert value.device.type == "cpu"
        group.reload()  # no wait in between
        assert value.device == GPU
        group.wait_on_device()
        assert float(value.double().sum()) == trip * value.numel()


def test_memory_is_not_handed_out_while_it_is_still_being_copied() -> None:
    transfers = CudaTransfers(GPU)
    for trip in range(5):
        group = OffloadGroup(transfers)
        value = torch.full((256 * MIB // 4,), float(trip), device=GPU)
        group.offload([value])
        others = [torch.full_like(value, -1.0, device=GPU) for _ in range(2)]  # would take the same memory
        group.wait()
        assert value.is_pinned()
        assert value.eq(float(trip)).all()
        del others


def test_offloaded_tensors_take_no_memory_of_the_gpu() -> None:
    group = OffloadGroup(CudaTransfers(GPU))
    before = allocated()
    value = torch.ones(32 * MIB // 4, device=GPU)
    for _ in range(3):
        assert allocated() - before == 32 * MIB
        group.offload([value])
        assert allocated() - before == 0
        group.reload()
        group.wait_on_device()
    assert group.host_bytes == 32 * MIB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_updates_are_the_same_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hacrl.training.optimizer_block.BLOCK_BYTES", 2 * 512 * 1024 * 12
    )  # two tensors or three
    monkeypatch.setattr("hacrl.training.gradients.PREFETCH_BYTES", 2 * 512 * 1024 * 4)
    monkeypatch.setattr("hacrl.training.gradients.MAX_HELD_BYTES", 3 * 512 * 1024 * 4)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(512, 1024, generator=generator).to(dtype) for _ in range(9)]
    # four updates of three backward passes each, the last of which does not reach all
    gradients = [[[torch.randn_like(one) for one in start[:n]] for n in (9, 9, 5)] for _ in range(4)]
    transfers = CudaTransfers(GPU)

    def made(values: list[nn.Parameter], streams: bool, sums: bool) -> MasterWeightAdamW:
        offload_to = transfers if streams else None
        optimizer = MasterWeightAdamW(values, 1e-2, (0.9, 0.999), 0.1, offload_to=offload_to)
        if streams:
            optimizer.stream(transfers, offload_gradients=sums)
            optimizer.offload(transfers)
        return optimizer

    def trained(
        offload: bool, resumed: bool = False, streams: bool = False, sums: bool = False
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        values = [nn.Parameter(value.to(GPU)) for value in start]
        optimizer = made(values, streams, sums)
        for number, update in enumerate(gradients):
            if offload:
                optimizer.offload(transfers)
            if resumed and number == 2:
                saved = {name: value.cpu().clone() for name, value in optimizer.tensors().items()}
                optimizer = made(values, streams, sums)
                optimizer.load_tensors(saved)
            optimizer.zero_gradients()
            for found in update:
                busy(0.01)
                terms = [(value * one.to(GPU)).sum() for value, one in zip(values, found, strict=False)]
                torch.stack(terms).sum().backward()
            optimizer.clip_gradients(1.0)
            optimizer.step()
        tensors = {name: value.cpu().clone() for name, value in optimizer.tensors().items()}
        return [value.detach().cpu() for value in values], tensors

    weights, state = trained(offload=False)
    for options in (
        {"offload": True},
        {"offload": False, "resumed": True},
        {"offload": True, "resumed": True},
        {"offload": False, "streams": True},
        {"offload": True, "resumed": True, "streams": True},
        {"offload": False, "streams": True, "sums": True},
        {"offload": True, "resumed": True, "streams": True, "sums": True},
    ):
        found, tensors = trained(**options)
        assert all(torch.equal(one, other) for one, other in zip(weights, found, strict=True))
        assert state.keys() == tensors.keys()
        assert all(torch.equal(state[name], tensors[name]) for name in state)


def test_a_streamed_update_has_two_blocks_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen blocks of 48 MiB: masters and moments of 4 Mi weights, 768 MiB in all."""
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 48 * MIB)
    transfers = CudaTransfers(GPU)
    values = [nn.Parameter(torch.zeros(4 * MIB, dtype=torch.bfloat16, device=GPU)) for _ in range(16)]
    optimizer = MasterWeightAdamW(values, 1e-2, (0.9, 0.999), 0.0)
    assert len(optimizer.blocks) == 16
    optimizer.stream(transfers)
    for number in range(3):
        optimizer.offload(transfers)
        optimizer.wait()
        optimizer.zero_gradients()
        for gradient in optimizer.gradients:
            gradient.fill_(1.0)
        held = allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        # moments are made in the first update, with what that needs
        assert 48 * MIB < peak - held <= (3 if number == 0 else 2) * 48 * MIB + MIB
        assert allocated() - held < MIB
    # a constant gradient makes Adam step by the learning rate, three times
    assert all(value.float().sub(-0.03).abs().max() < 2e-4 for value in values)


def test_offloaded_gradient_sums_take_the_memory_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen sums of 16 MiB: two prefetched, three offloading, and the one that a gradient is added to."""
    monkeypatch.setattr("hacrl.training.gradients.PREFETCH_BYTES", 32 * MIB)
    monkeypatch.setattr("hacrl.training.gradients.MAX_HELD_BYTES", 48 * MIB)
    transfers = CudaTransfers(GPU)
    values = [nn.Parameter(torch.zeros(4 * MIB, dtype=torch.bfloat16, device=GPU)) for _ in range(16)]
    optimizer = MasterWeightAdamW(values, 1e-2, (0.9, 0.999), 0.0, offload_to=transfers)
    optimizer.stream(transfers, offload_gradients=True)
    optimizer.wait()
    held = allocated()
    for number in range(3):
        optimizer.zero_gradients()
        allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            for value in values:
                value.backward(torch.ones_like(value))
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        assert peak - held < (2 + 3 + 1) * 16 * MIB + 24 * MIB, number  # and gradients of 8 MiB
        assert optimizer.clip_gradients(1e9) == pytest.approx(4 * (16 * 4 * MIB) ** 0.5)
        assert allocated() - held < MIB
        optimizer.step()
        optimizer.wait()
    assert all(value.float().sub(-0.03).abs().max() < 2e-4 for value in values)


# --- whole runs ---


class Memory(Observer):
    """Bytes of the GPU when a response has come: the least of a step, phase and agent."""

    def __init__(self) -> None:
        self.least: dict[tuple[int, Phase, str], int] = {}
        self._now: tuple[int, Phase, str] = (0, "evaluate", "")

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        self._now = (step, phase, agent)

    def on_response(self, agent: str) -> None:
        used = allocated(collect=False)  # it is called often
        self.least[self._now] = min(used, self.least.get(self._now, used))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two bfloat16 agents large enough that their optimizers are not lost in the noise."""
    folder = tmp_path_factory.mktemp("models")
    characters, pairs = character_tokenizer(), pair_tokenizer()
    agents = [
        Agent("qwen", tiny_qwen(characters, width=1024).to(torch.bfloat16), characters),
        Agent("llama", tiny_llama(pairs, width=1024).to(torch.bfloat16), pairs),
    ]
    for agent in agents:
        agent.save(folder / agent.name)
    return {agent.name: folder / agent.name for agent in agents}


def config(models: dict[str, Path], output: Path, level: str) -> RunConfig:
    agents = [{"name": name, "model": str(path), "precision": "bfloat16"} for name, path in models.items()]
    return build_config(
        {
            "agents": agents,
            "output": str(output),
            "steps": STEPS,
            "device": DEVICE,
            "learning": {"lr": 1e-3, "offload": level, "compile": False},
            "rollout": {"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 8},
            "evaluation": {"problems": 3},
            "checkpoint": {"every": 1},
        }
    )


def run_whole(run_config: RunConfig, *observers: Observer) -> None:
    with LocalRun(run_config, observers, task=SevensTask()) as run:
        run.train()
        run.save()


def assert_same(one: Path, other: Path) -> None:
    """Metrics, and saved weights to the bit."""
    lines, expected = ((folder / "metrics.jsonl").read_text() for folder in (one, other))
    assert [json.loads(line) for line in lines.splitlines()] == [
        json.loads(line) for line in expected.splitlines()
    ]
    for agent in ("qwen", "llama"):
        tensors, other_tensors = (
            load_file(folder / "agents" / agent / "model.safetensors") for folder in (one, other)
        )
        assert [name for name in tensors if not torch.equal(tensors[name], other_tensors[name])] == []


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that add up in the same order every time, as far as there are any."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_the_same_to_the_bit(
    models: dict[str, Path], tmp_path: Path, repeatable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_whole(config(models, tmp_path / "never", "never"))
    run_whole(config(models, tmp_path / "again", "never"))
    try:
        assert_same(tmp_path / "never", tmp_path / "again")
    except AssertionError:
        pytest.skip("this GPU does not repeat itself, whatever is offloaded")
    monkeypatch.setattr(
        "hacrl.training.gradients.MIN_OFFLOAD_BYTES", 2**10
    )  # so that all matrices are offloaded
    for level in ("optimizer", "stream", "weights", "all"):
        run_whole(config(models, tmp_path / level, level))
        assert_same(tmp_path / "never", tmp_path / level)
    start, end = (
        load_file(folder / "model.safetensors") for folder in (models["qwen"], tmp_path / "all/agents/qwen")
    )
    assert any(not torch.equal(start[name], end[name]) for name in start)  # it did learn
    with LocalRun(config(models, tmp_path / "parts", "all"), task=SevensTask()) as run:
        run.trainer.after_step = lambda: run.interrupt()
        run.train()
        run.save()
    found = inspect_run(tmp_path / "parts")
    with LocalRun(found.config, task=SevensTask(), resumed=found.point) as run:
        run.train()
        run.save()
    assert_same(tmp_path / "never", tmp_path / "parts")


@pytest.mark.filterwarnings("ignore")
def test_agents_generate_with_more_memory_and_are_reloaded_afterwards(
    models: dict[str, Path], tmp_path: Path
) -> None:
    seen: dict[str, Memory] = {}
    run_whole(config(models, tmp_path / "warm", "never"))  # libraries take their own memory once
    for level in ("never", "optimizer", "all"):
        seen[level] = Memory()
        with LocalRun(config(models, tmp_path / level, level), [seen[level]], task=SevensTask()) as run:
            run.train()
        agents = {one.name: one.agent for one in run.trainer.executor.workers.values()}
        assert {agent.device.type for agent in agents.values()} == {DEVICE}
        counts = {name: sum(p.numel() for p in agent.model.parameters()) for name, agent in agents.items()}
        del run, agents
        gc.collect()
        torch.cuda.empty_cache()
    # While an agent generates in the last step: of every weight of both, a float32 master, two moments and
    # the gradient are gone (16 bytes); and, if asked for, the other's bfloat16 weights. A tenth of that for
    # what engines keep
    both = 16 * sum(counts.values())
    for name in counts:
        others = 2 * (sum(counts.values()) - counts[name])
        full = seen["never"].least[STEPS, "rollout", name]
        assert full - seen["optimizer"].least[STEPS, "rollout", name] > 0.9 * both
        assert full - seen["all"].least[STEPS, "rollout", name] > 0.9 * (both + others)


@pytest.mark.filterwarnings("ignore")
def test_the_offloaded_bytes_by_hand(models: dict[str, Path], tmp_path: Path) -> None:
    """Without the engines' noise: two agents that have learnt, and whose turn it is."""
    settings = config(models, tmp_path / "run", "all")
    trainer = build_trainer(settings, preflight(settings, SevensTask()))
    trainer.step(1)
    counts = {}
    for one in trainer.executor.workers.values():
        one.engine.close()
        counts[one.name] = sum(p.numel() for p in one.agent.model.parameters())
    qwen, llama = counts["qwen"], counts["llama"]
    trainer.executor.residency.prepare_generation("qwen")
    trainer.executor.residency.offload("qwen")
    empty = allocated()  # no agent's weights or optimizer
    expected = {  # bytes per weight: 2; gradients come with the next update only
        ("prepare_generation", "qwen"): 2 * qwen,
        ("prepare_generation", "llama"): 2 * llama,
        ("prepare_learning", "qwen"): 2 * qwen,  # the optimizer comes for the update alone
        ("prepare_learning", "llama"): 2 * llama,
    }
    for (turn, name), size in expected.items():
        getattr(trainer.executor.residency, turn)(name)
        assert allocated() - empty == size
    trainer.executor.residency.reload_all_weights()
    assert allocated() - empty == 2 * (qwen + llama)


def test_auto_offloads_nothing_from_a_gpu_with_enough_memory(models: dict[str, Path], tmp_path: Path) -> None:
    settings = config(models, tmp_path / "auto", "auto")
    trainer = build_trainer(settings, preflight(settings, SevensTask()))
    assert trainer.executor.residency.notes == ()
    before = allocated()
    trainer.executor.residency.prepare_generation("qwen")
    assert allocated() == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "device_bytes", lambda device: 2**40 if device == "cpu" else 2**20)
        crowded = build_trainer(settings, preflight(settings, SevensTask()))
    assert "weights of agents not at work are offloaded" in crowded.executor.residency.notes[0]
