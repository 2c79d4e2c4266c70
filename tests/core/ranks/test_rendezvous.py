"""A listener accepts only the stage that it expects, and uses the same network interface as gloo."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from lightning_asyncpp.core.wire import connect as rendezvous
from lightning_asyncpp.core.wire.connect import INTERFACE_VARIABLE, Listener, call, network_address, use_loopback

NCCL = "NCCL_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def loopback() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in (INTERFACE_VARIABLE, NCCL)}
    os.environ[INTERFACE_VARIABLE] = "lo"
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener()) as listening:
        yield listening


def stranger_at(listener: Listener, shows: bytes) -> socket.socket:
    stranger = socket.create_connection(json.loads(listener.offer)["address"], timeout=10)
    stranger.sendall(shows)
    return stranger


def connected(listener: Listener) -> tuple[socket.socket, socket.socket]:
    return call(listener.offer, "rank 0"), listener.answer("rank 1", seconds=20)


@pytest.mark.parametrize("shows", [bytes(16), b"GET / HTTP/1.1\r\n\r\n"], ids=["zeros", "http"])
def test_a_stranger_is_sent_away(listener: Listener, shows: bytes) -> None:
    strangers = [stranger_at(listener, shows) for _ in range(3)]
    start = time.monotonic()
    connected(listener)
    assert time.monotonic() - start < 5
    for stranger in strangers:
        try:
            assert stranger.recv(100) == b""
        except ConnectionResetError:
            continue


def test_a_silent_stranger_holds_nobody_up_for_long(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SHOW_SECONDS", 0.3)
    strangers = [stranger_at(listener, b"") for _ in range(2)]
    start = time.monotonic()
    connected(listener)
    assert 0.5 < time.monotonic() - start < 5
    assert strangers


def test_loopback_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    del os.environ[INTERFACE_VARIABLE]
    use_loopback()
    assert (os.environ[INTERFACE_VARIABLE], os.environ[NCCL], network_address()) == ("lo", "=lo", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "_address_of", {"eth7": "10.1.2.3", "eth8": "10.1.2.4"}.get)
    os.environ[INTERFACE_VARIABLE] = "eth7,eth8"
    del os.environ[NCCL]
    use_loopback()
    assert (os.environ[INTERFACE_VARIABLE], os.environ.get(NCCL)) == ("eth7,eth8", None)
    assert network_address() == "10.1.2.3"
