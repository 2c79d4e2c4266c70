"""The store listens on one address, and torch takes it for its own; where others could not find it, nobody waits."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts import store
from lightning_asyncpp.strategy_parts.store import store_listening_on
from tests.trainer.launching.sockets import listening_addresses
from tests.workers import free_port

PATIENCE = timedelta(seconds=10)


@dataclass
class Environment:
    """What the store asks of Lightning's ClusterEnvironment."""

    main_address: str = "127.0.0.1"
    main_port: int = 0
    name: str = "cluster"


def listened_on() -> list[str]:
    return listening_addresses(os.getpid())


def test_torch_takes_the_store_that_is_there() -> None:
    """The server outlives our own handle, and nothing listens on other addresses meanwhile."""
    environment = Environment("this name does not matter", free_port())
    before = listened_on()
    with store_listening_on(environment, ["127.0.0.2"], 0, on_one_machine=True, timeout=PATIENCE) as reached:
        assert (reached.main_address, reached.main_port, reached.name) == (
            "127.0.0.2",
            environment.main_port,
            "cluster",
        )
        taken = dist.TCPStore("127.0.0.2", reached.main_port, None, True, PATIENCE, False, multi_tenant=True)
    other = dist.TCPStore("127.0.0.2", environment.main_port, None, False, PATIENCE, False)
    other.set("key", "value")
    assert taken.get("key") == b"value"
    assert listened_on() == sorted([*before, "127.0.0.2"])
    del taken, other
    assert listened_on() == before


@pytest.mark.parametrize(
    ("rank", "addresses", "on_one_machine"), [(0, [], False), (1, ["127.0.0.2"], False)], ids=["any", "another rank"]
)
def test_where_nothing_is_to_be_done(rank: int, addresses: list[str], on_one_machine: bool) -> None:
    environment = Environment()
    with store_listening_on(environment, addresses, rank, on_one_machine) as reached:
        assert reached is environment


def test_torchruns_store_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    environment = Environment()
    with store_listening_on(environment, ["127.0.0.1"], 0, on_one_machine=True) as reached:
        assert reached is environment


def test_other_ranks_of_one_machine_look_for_it_there() -> None:
    with store_listening_on(Environment("node17"), ["127.0.0.2"], 1, on_one_machine=True) as reached:
        assert reached.main_address == "127.0.0.2"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1, port {port} .*set MASTER_PORT"):
            with store_listening_on(Environment(main_port=port), ["127.0.0.1"], 0, on_one_machine=True):
                pass


def test_a_main_address_on_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machines would call there in vain for half an hour."""
    monkeypatch.setattr(store, "addresses_of_all", lambda: ["127.0.0.1", "10.0.0.5", "192.168.0.3"])
    with pytest.raises(ConfigurationError, match=r"MASTER_ADDR=192\.168\.0\.3 .* set MASTER_ADDR=10\.0\.0\.5 on all"):
        with store_listening_on(Environment("192.168.0.3"), ["10.0.0.5"], 0, on_one_machine=False):
            pass


@pytest.mark.parametrize("main_address", ["127.0.1.1", "10.99.0.1", "no-such-name.invalid"])
def test_an_address_that_may_lead_here_is_not(monkeypatch: pytest.MonkeyPatch, main_address: str) -> None:
    """This machine's name in its own hosts file, an address that is translated on the way, a name that nobody knows."""
    monkeypatch.setattr(store, "addresses_of_all", lambda: ["127.0.0.1", "127.0.0.2", "192.168.0.3"])
    environment = Environment(main_address, free_port())
    with store_listening_on(environment, ["127.0.0.2"], 0, on_one_machine=False, timeout=PATIENCE) as reached:
        assert reached.main_address == "127.0.0.2"
