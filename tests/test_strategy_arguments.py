"""Strategies refuse wrong arguments when they are created, or before ranks connect."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_asyncpp import fabric, trainer
from lightning_asyncpp.errors import ConfigurationError

NAMES = ("AsyncPipelineStrategy", "SyncPipelineStrategy")
PIPELINES = [getattr(package, name) for package in (trainer, fabric) for name in NAMES]
OF_ONE_PROCESS = [package.DelayedGradientStrategy for package in (trainer, fabric)]


@pytest.mark.parametrize("strategy", [*PIPELINES, *OF_ONE_PROCESS], ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_all_wrong_arguments_are_named_at_once(strategy: type) -> None:
    """One error names all wrong arguments with their values; ``tests/core/test_settings.py`` tests each rule."""
    wrong = {"microbatches": 2.5, "partition": "even", "slack": "exactly", "nonfinite_gradients": "leave"}
    wrong |= {"state_dict_type": ""} if strategy in PIPELINES else {}
    with pytest.raises(ConfigurationError) as caught:
        strategy(**wrong)
    assert not [name for name, value in wrong.items() if f"{name}={value!r}" not in str(caught.value)]
    with pytest.raises(TypeError, match=r"\.__init__\(\) .*unexpected keyword argument 'lookahed'"):
        strategy(lookahed=1)


@pytest.mark.parametrize("package", [trainer, fabric], ids=lambda package: package.__name__)
def test_what_does_not_fit_the_ranks_is_found_before_they_connect(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks do not exist here, so waiting for them would end with a timeout."""
    variables = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "3") | {"TORCHELASTIC_RUN_ID": "none"}
    for name, value in (variables | dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")).items():
        monkeypatch.setenv(name, value)
    strategy = package.AsyncPipelineStrategy(microbatches=2, timeout=timedelta(seconds=5))
    run = (L.Trainer if package is trainer else L.Fabric)(strategy=strategy, devices=3, accelerator="cpu")
    begin = functools.partial(run.fit, BoringModel()) if isinstance(run, L.Trainer) else run.launch
    with pytest.raises(ConfigurationError, match=r"microbatches=2 is smaller than the number of stages \(3\)"):
        begin()
