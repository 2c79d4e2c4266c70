"""What is sent is kept until it has arrived, and not longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline.header import Header, describe
from lightning_asyncpp.pipeline.mesh import Groups, Mesh
from lightning_asyncpp.pipeline.transport import Transport


class Sending:
    """A send that is done once it was waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.before, self.waited = tensor, tensor.clone(), False

    def wait(self) -> None:
        assert torch.equal(self.tensor, self.before), "what is being sent was written over"
        self.waited = True


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[Sending]:
    """Every send, in order; nothing is really sent."""
    started: list[Sending] = []

    def isend(tensor: torch.Tensor, *_: Any, **__: Any) -> Sending:
        started.append(Sending(tensor))
        return started[-1]

    monkeypatch.setattr(dist, "isend", isend)
    return started


@pytest.fixture
def transport(sends: list[Sending]) -> Transport:
    """Of the first of two stages."""
    groups: Any = object()
    return Transport(Mesh(2, 1, 1, Groups(groups, groups)), torch.device("cpu"), 2**20)


def send(transport: Transport, k: int) -> int:
    tensors = (torch.full((3,), float(k)),)
    return transport.send_activation(Header(k, Header.TENSOR, 1.0, 0, describe(tensors)), tensors)


def test_an_envelope_is_filled_again_only_after_its_send(transport: Transport, sends: list[Sending]) -> None:
    for k in range(12):
        assert send(transport, k) == k
        if k >= 5:
            transport.settle(activations=k - 5)
    transport.settle()
    assert all(sending.waited for sending in sends)
    assert len({id(sending.tensor) for sending in sends[-6:]}) == 6
    assert len({sending.tensor.data_ptr() for sending in sends}) < len(sends), "envelopes are used again"


def test_sends_of_an_evaluation_do_not_keep_those_of_the_training_behind_it(
    transport: Transport, sends: list[Sending]
) -> None:
    """Evaluations count their micro-batches anew: messages are let go of by their own number."""
    for k in range(40):
        send(transport, k)
        transport.settle(activations=transport.activations_sent - 8)
    for k in range(4, 14):
        number = send(transport, k)
        transport.settle(activations=number - 2)
    assert sum(not sending.waited for sending in sends) == 2
