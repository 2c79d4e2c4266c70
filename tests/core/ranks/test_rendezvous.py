"""One rank calls another: by any way that works, and nobody else gets in between or holds them up."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_asyncpp.core.ranks import rendezvous
from lightning_asyncpp.core.ranks.interfaces import INTERFACE_VARIABLE
from lightning_asyncpp.core.ranks.rendezvous import Listener, call
from lightning_asyncpp.errors import PeerLostError, ProtocolError

LOCAL, NETWORK = "local", "network"


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as listening:
        yield listening


def offer_of(listener: Listener, **changes: Any) -> str:
    return json.dumps({**json.loads(listener.offer), **changes})


def call_of(listener: Listener, offer: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a call that follows an offer."""
    called: list[socket.socket] = []
    caller = threading.Thread(target=lambda: called.append(call(offer, "rank 0", "rank 1")))
    caller.start()
    answered = listener.answer("rank 1", seconds=20)
    caller.join(20)
    called[0].sendall(b"it is me")
    assert answered.recv(8) == b"it is me"
    return called[0], answered


def address_of(listener: Listener, way: str) -> Any:
    address = json.loads(listener.offer)[way][0]
    return address if way == LOCAL else tuple(address)


def stranger_at(listener: Listener, way: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX if way == LOCAL else socket.AF_INET)
    stranger.settimeout(10)
    stranger.connect(address_of(listener, way))
    return stranger


@pytest.mark.parametrize("way", [LOCAL, NETWORK])
def test_by_either_way(listener: Listener, way: str) -> None:
    ends = call_of(listener, offer_of(listener, **({} if way == LOCAL else {LOCAL: []})))
    assert [(end.family == socket.AF_UNIX) for end in ends] == [way == LOCAL] * 2


def test_from_another_network_a_local_address_cannot_be_reached_and_the_next_is_tried(listener: Listener) -> None:
    ends = call_of(listener, offer_of(listener, local=["\0asyncpp-nobody-listens-here"]))
    assert ends[0].family != socket.AF_UNIX


@pytest.mark.parametrize("way", [LOCAL, NETWORK])
@pytest.mark.parametrize("said", [b"", bytes(10), bytes(16), bytes(48), bytes(500)], ids=len)
def test_a_stranger_is_sent_away_and_holds_nobody_up(listener: Listener, way: str, said: bytes) -> None:
    strangers = [stranger_at(listener, way) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(said)
    start = time.monotonic()
    call_of(listener, listener.offer)
    assert time.monotonic() - start < 5
    listener.close()
    for stranger in strangers:  # at most a number and a proof, which are of no use to it
        assert len(all_of(stranger)) in (0, 48)


def all_of(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(1000):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_more_strangers_than_are_kept(listener: Listener) -> None:
    strangers = [stranger_at(listener, NETWORK) for _ in range(rendezvous._MOST_CALLERS + 30)]
    call_of(listener, offer_of(listener, local=[]))
    assert [all_of(stranger) for stranger in strangers] == [b""] * len(strangers)


def test_what_one_caller_said_is_of_no_use_to_another(listener: Listener) -> None:
    """Neither the secret crosses, nor anything that could be said a second time."""
    (recorded,) = recorded_call(listener)
    assert bytes.fromhex(json.loads(listener.offer)["secret"]) not in recorded
    stranger = stranger_at(listener, LOCAL)
    stranger.sendall(recorded)
    with pytest.raises(PeerLostError, match=r"rank 1 did not call within 0\.5 seconds"):
        listener.answer("rank 1", seconds=0.5)


def recorded_call(listener: Listener) -> list[bytes]:
    """What a caller says to a relay that passes it on."""
    relay = socket.create_server(("127.0.0.1", 0))
    recorded: list[bytes] = []

    def pass_on() -> None:
        caller, _ = relay.accept()
        target = stranger_at(listener, NETWORK)
        number = caller.recv(16, socket.MSG_WAITALL)
        target.sendall(number)
        caller.sendall(target.recv(48, socket.MSG_WAITALL))
        proof = caller.recv(32, socket.MSG_WAITALL)
        recorded.append(number + proof)
        target.sendall(proof)
        time.sleep(0.2)

    threading.Thread(target=pass_on, daemon=True).start()
    offer = offer_of(listener, local=[], network=[relay.getsockname()])
    threading.Thread(target=call, args=(offer, "rank 0", "rank 1"), daemon=True).start()
    listener.answer("rank 1", seconds=10)
    return recorded


def test_a_process_of_another_user_is_sent_away(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PeerLostError, match="somebody else"):
        call(offer_of(listener, network=[]), "rank 0", "rank 1")
    stranger_at(listener, LOCAL)
    with pytest.raises(PeerLostError):
        listener.answer("rank 1", seconds=0.3)


def test_addresses_are_tried_in_turn_and_named_if_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One where nobody listens, one where somebody says nothing, one where somebody says something else."""
    monkeypatch.setattr(rendezvous, "_CALL_SECONDS", 0.3)
    silent, talking = socket.create_server(("127.0.0.2", 0)), socket.create_server(("127.0.0.3", 0))
    port = silent.getsockname()[1]

    def talk() -> None:
        talking.accept()[0].sendall(bytes(48))

    threading.Thread(target=talk, daemon=True).start()
    network = [["127.0.0.1", port], ["127.0.0.2", port], ["127.0.0.3", talking.getsockname()[1]]]
    offer = json.dumps({"local": [], "network": network, "secret": bytes(32).hex()})
    with pytest.raises(PeerLostError) as caught:
        call(offer, "rank 0 (stage 1)", "stage 0")
    text = str(caught.value)
    assert "rank 0 (stage 1) cannot be reached from stage 0" in text
    assert f"('127.0.0.1', {port}) ([Errno" in text
    assert f"('127.0.0.2', {port}) (timed out)" in text
    assert f"('127.0.0.3', {talking.getsockname()[1]}) (somebody else)" in text
    assert "set GLOO_SOCKET_IFNAME" in text


@pytest.mark.parametrize(
    "offer", ["", "[]", "{}", '{"local": [], "network": [1], "secret": ""}', "[" * 100_000, '{"local": 1', "\0"]
)
def test_what_is_no_offer_is_refused(offer: str) -> None:
    with pytest.raises(ProtocolError, match="rank 0 did not say where to call"):
        call(offer, "rank 0", "rank 1")


@pytest.mark.parametrize("address", [["\x80" * 70, 1], ["127.0.0.1", 2**40], ["127.0.0.1", -1], ["\0", 1]])
def test_an_address_that_is_none_is_one_that_cannot_be_reached(address: list[Any]) -> None:
    offer = json.dumps({"local": ["\0" * 200], "network": [address], "secret": bytes(32).hex()})
    with pytest.raises(PeerLostError, match="cannot be reached"):
        call(offer, "rank 0", "rank 1")


def test_only_the_interface_that_was_named_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    with Listener() as listener:
        assert [s.getsockname()[0] for s in listener._network] == ["127.0.0.1"]
        assert [host for host, _ in json.loads(listener.offer)["network"]] == ["127.0.0.1"]
        call_of(listener, offer_of(listener, local=[]))
    monkeypatch.delenv(INTERFACE_VARIABLE)
    with Listener() as listener:
        assert listener._network[0].getsockname()[0] in ("::", "0.0.0.0")
