"""What passes between neighbours whatever its shape, and what an earlier transport leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline import exchange
from lightning_asyncpp.pipeline.header import Header, describe
from lightning_asyncpp.pipeline.inbox import Tags
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.transport import Transport
from tests.pipeline.pool import end_with_parent, free_port, worker_context

SHAPES: list[tuple[int, ...] | None] = [(2, 3), (2, 3), None, (1, 3), (2, 3), None, None, (4,), (2, 3), (2, 3)]


def test_tags_of_transports_differ() -> None:
    tags = {tag for channel in range(4) for tag in Tags.of(channel)}
    assert len(tags) == 12
    assert not tags & {exchange._TAG_PART, exchange._TAG_TOTAL}, "control messages travel in the same group"


def test_activations_of_changing_shapes_arrive_in_order() -> None:
    """Twice over the same groups: what the first transport left posted must not take what the second sends."""
    received = _on_two_ranks(_exchange_twice)
    expected = [(k, list(shape or ()), float(k)) for k, shape in enumerate(SHAPES)]
    assert received == [expected, expected]


def _exchange_twice(mesh: Mesh) -> list[list[tuple[int, list[int], float]]]:
    received = []
    for _ in range(2):
        transport = Transport(mesh, torch.device("cpu"), 2**20)
        if mesh.is_first:
            for k, shape in enumerate(SHAPES):
                tensors = () if shape is None else (torch.full(shape, float(k)),)
                kind, weight = (Header.EMPTY, 0.0) if shape is None else (Header.TENSOR, 1.0)
                transport.send_activation(Header(k, kind, weight, 0, describe(tensors)), tensors)
            transport.settle()
        else:
            arrivals = [transport.receive_activation(k) for k in range(len(SHAPES))]
            received.append([_plain(k, arrival.tensors) for k, arrival in enumerate(arrivals)])
    return received


def test_training_follows_an_evaluation_without_gradients() -> None:
    """What was made ready in inference mode serves outside of it, where gradients are asked for."""
    assert _on_two_ranks(_evaluate_then_train) == [float(k) for k in range(8)]


def _evaluate_then_train(mesh: Mesh) -> list[float]:
    transport = Transport(mesh, torch.device("cpu"), 2**20)
    received = []
    for k in range(8):
        with torch.inference_mode(k < 4):
            if mesh.is_first:
                tensors = (torch.full((3,), float(k), requires_grad=k >= 4),)
                transport.send_activation(Header(k, Header.TENSOR, 1.0, 0, describe(tensors)), tensors)
                transport.settle()
            else:
                tensor = transport.receive_activation(k).tensors[0]
                if k >= 4:
                    (tensor.requires_grad_() * 2).sum().backward()
                    assert tensor.grad is not None
                received.append(float(tensor[0]))
    return received


def _plain(k: int, tensors: tuple[torch.Tensor, ...]) -> tuple[int, list[int], float]:
    return (k, list(tensors[0].shape), float(tensors[0].flatten()[0])) if tensors else (k, [], float(k))


def _on_two_ranks(function: Callable[[Mesh], Any]) -> Any:
    """What ``function`` returns on the last stage of two."""
    context, port = worker_context(), free_port()
    results = context.Queue()
    processes = [context.Process(target=_run, args=(rank, port, function, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        return results.get(timeout=60)
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()


def _run(rank: int, port: int, function: Callable[[Mesh], Any], results: Any) -> None:
    end_with_parent()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = Mesh(2, 1, rank)
    mesh.connect()
    outcome = function(mesh)
    if mesh.is_last:
        results.put(outcome)
    dist.barrier()
    dist.destroy_process_group()
