"""Weights travel in buckets, and arrive in another process to the last bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.engines.replicas.weight_broadcast import (
    GroupSettings,
    WeightGroup,
    buckets,
    receive_bucket,
    send_weights,
    sent_weights,
    transport_between,
)
from hacrl.models.lora import add_adapters
from hacrl.models.rank_group import Meeting, listen
from tests.support.engines import engine_agent

CPU, HALF = torch.device("cpu"), torch.bfloat16


def test_neighbours_share_a_bucket_up_to_its_size() -> None:
    weights = [
        ("a", torch.arange(4.0)),  # 16 bytes
        ("b", torch.arange(2.0).view(1, 2)),  # 24 bytes so far
        ("c", torch.arange(3.0)),  # 12 more would be 36: a new bucket
        ("d", torch.arange(9.0)),  # larger than any bucket: alone
        ("e", torch.arange(2).to(HALF)),  # another type
        ("f", torch.arange(2).to(HALF)),
    ]
    found = [(names, flat.tolist()) for names, flat in buckets(weights, CPU, most=32)]
    assert found == [
        (["a", "b"], [0, 1, 2, 3, 0, 1]),
        (["c"], [0, 1, 2]),
        (["d"], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (["e", "f"], [0, 1, 0, 1]),
    ]


def test_a_bucket_is_a_copy() -> None:
    """A gathered weight may be freed before its bucket is full."""
    weight = torch.ones(3)

    def gathered() -> Any:
        yield "a", weight
        weight.zero_()
        yield "b", torch.ones(1)

    assert [flat.tolist() for _, flat in buckets(gathered(), CPU)] == [[1, 1, 1, 1]]


def test_with_adapters_only_they_are_sent_again() -> None:
    agent = engine_agent()
    settings = AgentSettings(name="ada", model="-", lora=LoraSettings(rank=4))
    model = add_adapters(agent.model, settings, seed=0)
    names = [name for name, _ in sent_weights(model, everything=False)]
    assert len(names) == 2 * 2 * 7  # A and B of seven layers in two blocks
    assert all("lora_" in name for name in names)
    everything = dict(sent_weights(model, everything=True))
    assert everything.keys() == {*dict(model.named_parameters()), *dict(model.named_buffers())}


@pytest.mark.parametrize(
    ("learner", "replicas", "transport"),
    [
        ("cuda:0", ["cuda:1", "cuda:2"], "nccl"),
        ("cuda:0", ["cuda:0", "cuda:1"], "gloo"),  # NCCL refuses two processes on one GPU
        ("cuda:0", ["cpu"], "gloo"),
        ("cpu", ["cpu", "cpu"], "gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_every_process(learner: str, replicas: list[str], transport: str) -> None:
    assert transport_between(torch.device(learner), list(map(torch.device, replicas))) == transport


def test_two_receivers_get_the_weights_to_the_last_bit() -> None:
    store = listen(Meeting("127.0.0.1", 0, 0, 3), 60.0)
    weights = {
        "large": torch.randn(700, 100),
        "small": torch.randn(5),
        "half": torch.randn(3, 3).to(HALF),
        "last": torch.tensor(float("nan")),
    }
    received: dict[int, dict[str, torch.Tensor]] = {}
    messages: list[dict[str, Any]] = []
    announced = threading.Condition()

    def receive(rank: int) -> None:
        own = listen(Meeting("127.0.0.1", store.port, rank, 3), 60.0)
        group = WeightGroup(GroupSettings(1, "gloo", rank, 3, 60.0), own, "127.0.0.1", CPU)
        targets = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for number in range(3):  # float32, bfloat16, float32
            with announced:
                assert announced.wait_for(lambda number=number: len(messages) > number, 60)
            receive_bucket(messages[number], targets, group)
        received[rank] = targets

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    group = WeightGroup(GroupSettings(1, "gloo", 0, 3, 60.0), store, "127.0.0.1", CPU)

    def announce(message: dict[str, Any]) -> None:
        with announced:
            messages.append(message)
            announced.notify_all()

    sent = send_weights(weights.items(), announce, group)
    for thread in threads:
        thread.join(60)
    assert sent == 4 * (70_000 + 5 + 1) + 2 * 9
    assert [message["names"] for message in messages] == [["large", "small"], ["half"], ["last"]]
    for rank in (1, 2):
        for name, weight in weights.items():
            assert torch.equal(received[rank][name].nan_to_num(7.0), weight.nan_to_num(7.0))
