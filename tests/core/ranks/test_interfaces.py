"""Which interface is used: the one that is named, loopback on one machine, and never one that is not there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from lightning_asyncpp.core.ranks import interfaces
from lightning_asyncpp.core.ranks.interfaces import INTERFACE_VARIABLE, own_addresses, use_interface
from lightning_asyncpp.errors import ConfigurationError

NCCL = "NCCL_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def nothing_named() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in (INTERFACE_VARIABLE, NCCL)}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def variables() -> tuple[str | None, str | None]:
    return os.environ.get(INTERFACE_VARIABLE), os.environ.get(NCCL)


def test_loopback_on_one_machine() -> None:
    assert use_interface(None, on_one_machine=True) == ["127.0.0.1"]
    assert variables() == ("lo", "=lo")


def test_anything_between_machines() -> None:
    assert use_interface(None, on_one_machine=False) == []
    assert variables() == (None, None)


def test_what_the_variables_say_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "address_of", {"eth7": "10.1.2.3"}.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    os.environ[INTERFACE_VARIABLE] = "eth7"
    assert use_interface(None, on_one_machine=True) == ["10.1.2.3"]
    assert variables() == ("eth7", None)


def test_a_name_that_is_given_goes_before_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "address_of", {"eth7": "10.1.2.3", "eth8": "10.1.2.4"}.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7"), (3, "eth8")])
    os.environ[INTERFACE_VARIABLE] = os.environ[NCCL] = "lo"
    assert use_interface("eth7, eth8", on_one_machine=True) == ["10.1.2.3", "10.1.2.4"]
    assert variables() == ("eth7,eth8", "=eth7,eth8")
    assert own_addresses() == ["10.1.2.3", "10.1.2.4"]


@pytest.mark.parametrize("name", ["nothere9", "", "lo,nothere9", "lo:"])
def test_a_name_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^interface=.*has no network interface '(|nothere9|lo:)'; it has.*lo"
    ):
        use_interface(name, on_one_machine=True)
    assert variables() == (None, None)
    os.environ[INTERFACE_VARIABLE] = "nothere9"
    with pytest.raises(ConfigurationError, match=r"^GLOO_SOCKET_IFNAME=nothere9: .* it has.*lo"):
        use_interface(None, on_one_machine=True)


def test_one_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "dark0")])
    with pytest.raises(ConfigurationError, match=r"interface 'dark0' of .* has no IPv4 address"):
        use_interface("dark0", on_one_machine=False)


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_addresses()[0] == "127.0.0.1"
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    assert own_addresses() == ["127.0.0.1"]
