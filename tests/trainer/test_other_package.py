"""Who mixes pytorch_lightning with this package is told in one line that lightning.pytorch is meant."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.strategies.registry import _StrategyRegistry

import lightning_asyncpp
from lightning_asyncpp.trainer.other_package import refuse_other_package

MEANT = r"works with `import lightning.pytorch as pl`, and not with `import pytorch_lightning as pl`$"
OF_OTHER = f"^Net is a module of pytorch_lightning: lightning_asyncpp {MEANT}"


def module_of_the_other_package() -> Any:
    """A user's class over a LightningModule that is not Lightning's."""
    base = type("LightningModule", (torch.nn.Module,), {"__module__": "pytorch_lightning.core.module"})
    return type("Net", (base,), {})()


def test_a_module_of_the_other_package() -> None:
    for strategy in ("delayed_gradient", lightning_asyncpp.AsyncPipelineStrategy()):
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        with pytest.raises(lightning_asyncpp.ConfigurationError, match=OF_OTHER):
            trainer.fit(module_of_the_other_package())
    with pytest.raises(lightning_asyncpp.ConfigurationError, match=OF_OTHER):
        lightning_asyncpp.check_model(module_of_the_other_package(), [torch.zeros(1)])


def test_what_is_no_module_gets_lightnings_words() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        trainer.fit(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_strategy_for_the_other_trainer(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it is refused, whichever package was imported first; the Trainer shows an object as it calls itself."""
    other: Any = ModuleType("pytorch_lightning.strategies")
    other.StrategyRegistry = _StrategyRegistry()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    if is_first:
        monkeypatch.setitem(sys.modules, other.__name__, other)
    refuse_other_package(("async_pipeline",))
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert importlib.util.find_spec("pytorch_lightning_of_nobody") is None
    with pytest.raises(lightning_asyncpp.ConfigurationError, match=MEANT):
        other.StrategyRegistry.get("async_pipeline")
    shown = repr(lightning_asyncpp.SyncPipelineStrategy())
    assert shown == "<SyncPipelineStrategy for the Trainer of lightning.pytorch, not of pytorch_lightning>"
