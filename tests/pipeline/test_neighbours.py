"""Stages find each other: over real process groups, twice in a row, and nobody else gets in between."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline import neighbours
from lightning_asyncpp.pipeline.errors import PeerLostError
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.transport import Transport
from tests.pipeline.pool import end_with_parent, free_port, worker_context


def test_every_transport_has_links_of_its_own() -> None:
    """What an earlier one left unread cannot be taken for a message of a later one."""
    assert _on_three_ranks(_sum_twice) == [6.0, 6.0]


def _sum_twice(mesh: Mesh) -> list[float]:
    totals = []
    for _ in range(2):
        transport = Transport(mesh, torch.device("cpu"), 2**20)
        own = torch.full((1,), float(mesh.stage + 1), dtype=torch.float64)
        part = own if mesh.is_last else own + transport.receive_part(0, 1)
        if mesh.is_first:
            transport.send_total(0, part)
            transport.send_total(9, part)  # nobody ever asks for this one
        else:
            transport.send_part(0, part)
            totals.append(float(transport.receive_total(0, 1)))
    return totals


def _on_three_ranks(function: Callable[[Mesh], Any]) -> Any:
    """What ``function`` returns on the last stage of three."""
    context, port = worker_context(), free_port()
    results = context.Queue()
    processes = [context.Process(target=_run, args=(rank, port, function, results), daemon=True) for rank in range(3)]
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
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    mesh = Mesh(3, 1, rank)
    mesh.connect()
    outcome = function(mesh)
    if mesh.is_last:
        results.put(outcome)
    dist.barrier()
    dist.destroy_process_group()


def answered_by(offer: dict[str, Any], listeners: list[socket.socket], secret: bytes) -> list[socket.socket]:
    """Both ends of a call that follows an offer."""
    called: list[socket.socket] = []
    caller = threading.Thread(target=lambda: called.append(neighbours._call(Mesh(2, 1, 1), offer)))
    caller.start()
    answered = neighbours._answer(Mesh(2, 1, 0), listeners, secret)
    caller.join(10)
    called[0].sendall(b"it is me")
    assert answered.recv(8) == b"it is me"
    return [called[0], answered]


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET6], ids=["local", "network"])
def test_a_stranger_is_sent_away(family: socket.AddressFamily) -> None:
    secret, listeners = bytes(range(16)), neighbours._listen()
    offer = json.loads(json.dumps(neighbours._offer(listeners, secret)))
    if family != socket.AF_UNIX:
        offer["local"] = []
    stranger = socket.create_connection(("127.0.0.1", offer["network"][0][1]))
    stranger.sendall(bytes(16))
    ends = answered_by(offer, listeners, secret)
    assert (ends[0].family == socket.AF_UNIX) == (family == socket.AF_UNIX)
    assert stranger.recv(1) == b""


def test_from_another_network_a_local_address_cannot_be_reached_and_the_next_is_tried() -> None:
    secret, listeners = bytes(range(16)), neighbours._listen()
    offer = neighbours._offer(listeners, secret)
    ends = answered_by({**offer, "local": ["\0asyncpp-nobody-listens-here"]}, listeners, secret)
    assert ends[0].family != socket.AF_UNIX


def test_addresses_are_tried_in_turn_and_named_if_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One where nobody listens, one where somebody else does."""
    monkeypatch.setattr(neighbours, "_CALL_SECONDS", 0.5)
    other = socket.create_server(("127.0.0.2", 0))
    port = other.getsockname()[1]
    offer = {"local": [], "network": [["127.0.0.1", port], ["127.0.0.2", port]], "secret": bytes(16).hex()}
    with pytest.raises(PeerLostError) as caught:
        neighbours._call(Mesh(2, 1, 1), offer)
    text = str(caught.value)
    assert "rank 0 (stage 1) cannot be reached from stage 0" in text
    assert f"('127.0.0.1', {port}) (" in text
    assert f"('127.0.0.2', {port}) (" in text
    assert "set GLOO_SOCKET_IFNAME" in text


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(neighbours.INTERFACE_VARIABLE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert neighbours._own_addresses()[0] == "127.0.0.1"
    monkeypatch.setenv(neighbours.INTERFACE_VARIABLE, "lo")
    assert neighbours._own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv(neighbours.INTERFACE_VARIABLE, "nothere9")
    assert neighbours._own_addresses() == []
