"""Which interface is used: the one that is named, loopback on one machine, and never one that is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lightning_asyncpp.core.ranks import interfaces
from lightning_asyncpp.core.ranks.interfaces import INTERFACE_VARIABLE, named_addresses, own_addresses, use_loopback
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


def test_loopback_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_loopback()
    assert (variables(), named_addresses()) == (("lo", "=lo"), ["127.0.0.1"])
    monkeypatch.setattr(interfaces, "address_of", {"eth7": "10.1.2.3", "eth8": "10.1.2.4"}.get)
    os.environ[INTERFACE_VARIABLE] = "eth7,eth8"
    os.environ.pop(NCCL)
    use_loopback()
    assert variables() == ("eth7,eth8", None)
    assert named_addresses() == own_addresses() == ["10.1.2.3", "10.1.2.4"]


@pytest.mark.parametrize("name", ["nothere9", "lo,nothere9", "lo:"])
def test_a_name_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    os.environ[INTERFACE_VARIABLE] = name
    with pytest.raises(ConfigurationError, match=rf"^GLOO_SOCKET_IFNAME={name}: .* it has.*lo"):
        named_addresses()


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_addresses()[0] == "127.0.0.1"
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    assert own_addresses() == ["127.0.0.1"]
