"""Every private name of Fabric that the strategies use: without it they say so, and which."""

from __future__ import annotations

import pytest
from lightning.fabric import wrappers
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import Strategy

from lightning_asyncpp.fabric.private import backward_allowed, converted_state, drop_backward_sync_control
from lightning_asyncpp.private_names import PrivateNameError


def test_a_backward_is_allowed_meanwhile() -> None:
    with backward_allowed(True):
        assert wrappers._in_fabric_backward
        with backward_allowed(False):
            assert not wrappers._in_fabric_backward
        assert wrappers._in_fabric_backward
    assert not wrappers._in_fabric_backward


def test_without_fabrics_flag_for_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(wrappers, "_in_fabric_backward")
    with (
        pytest.raises(
            PrivateNameError, match=r"lightning 2\S+ has no lightning\.fabric\.wrappers\._in_fabric_backward"
        ),
        backward_allowed(True),
    ):
        pass


def test_without_fabrics_control_of_the_reduction() -> None:
    strategy = DDPStrategy()
    drop_backward_sync_control(strategy)
    assert strategy._backward_sync_control is None
    del strategy._backward_sync_control
    with pytest.raises(PrivateNameError, match=r"has no DDPStrategy\._backward_sync_control"):
        drop_backward_sync_control(strategy)


def test_without_fabrics_conversion_of_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert converted_state(DDPStrategy(), {"step": 3}, None) == {"step": 3}
    monkeypatch.delattr(Strategy, "_convert_stateful_objects_in_state")
    with pytest.raises(PrivateNameError, match=r"has no DDPStrategy\._convert_stateful_objects_in_state"):
        converted_state(DDPStrategy(), {"step": 3}, None)
