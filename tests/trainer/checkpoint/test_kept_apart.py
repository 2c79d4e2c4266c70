"""What stages keep apart: states of callbacks and additions to checkpoints hold all layers, and go on anywhere."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_asyncpp.core.checkpoint.apart import (
    Names,
    conflicts,
    fingerprint,
    own_again,
    readable,
    sendable,
    unite,
    without,
)
from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, arrays, loader, make_trainer, own_state

RUN = Run(Net, optimizer="adamw", samples=24)


class Average(L.Callback):
    """Averages weights by their names, and keeps the average in its state."""

    shadow: dict[str, torch.Tensor] | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.shadow = self.shadow or {name: weights.clone() for name, weights in module.state_dict().items()}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for name, weights in module.state_dict().items():
            self.shadow[name].lerp_(weights, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Figures(L.Callback):
    """Keeps what has no names: one number, an array and a list of each stage's own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        stage = trainer.strategy.session.mesh.stage
        self.state = {"stage": stage, "array": torch.full((2,), stage), "list": ["x"] * stage, "alike": 7}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Adds(Net):
    """Adds to a checkpoint by ``on_save_checkpoint``, and halves weights in it."""

    found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["norms"] = {name: float(p.detach().norm()) for name, p in self.named_parameters()}
        checkpoint["state_dict"] = {name: tensor.half() for name, tensor in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["norms"]


def averaged(run: Run, epochs: int, path: str) -> dict[str, Any]:
    """Train, save, and tell what callbacks have."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    callbacks = [Average(), Figures()]
    trainer = make_trainer(run, max_epochs=epochs, callbacks=callbacks)
    trainer.fit(module, loader(run), ckpt_path=run.ckpt_path, weights_only=False)
    trainer.save_checkpoint(path)
    return {
        "shadow": arrays(callbacks[0].shadow),
        "weights": arrays(dict(module.named_parameters())),
        "found": getattr(module, "found", None),
        "file": arrays(torch.load(path, weights_only=False)["callbacks"]["Average"]["shadow"]),
    }


def joined(results: list[dict[str, Any]], what: str) -> dict[str, Any]:
    return {name: value for result in results for name, value in result[what].items()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("stages", "resumed_on", "options"),
    [
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        (3, 2, {"state_dict_type": "sharded", "async_checkpoints": True}),
        (1, 2, {}),
        pytest.param(2, 3, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"data_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_an_average_by_names_goes_on(
    pools: Pools, tmp_path: Path, stages: int, resumed_on: int, options: dict[str, Any]
) -> None:
    replicas = options.get("data_parallel_size", 1)
    run = dataclasses.replace(RUN, options={"micro_batches": 3} | options)
    whole = pools.run(stages * replicas, averaged_without_reading, run, 2, str(tmp_path / "whole.ckpt"))
    pools.run(stages * replicas, averaged_without_reading, run, 1, str(tmp_path / "half.ckpt"))
    again = dataclasses.replace(run, ckpt_path=str(tmp_path / "half.ckpt"))
    resumed = pools.run(resumed_on * replicas, averaged_without_reading, again, 2, str(tmp_path / "resumed.ckpt"))
    assert_equal(joined(resumed, "weights"), joined(whole, "weights"))
    assert_equal(joined(resumed, "shadow"), joined(whole, "shadow"))
    for result in resumed:
        assert result["shadow"].keys() == result["entries"], "an average of what another stage trains grows stale"


def averaged_without_reading(run: Run, epochs: int, path: str) -> dict[str, Any]:
    """As :func:`averaged`, of any form of checkpoint."""
    L.seed_everything(run.seed, verbose=False)
    module, average = run.module(run), Average()
    trainer = make_trainer(run, max_epochs=epochs, callbacks=[average])
    trainer.fit(module, loader(run), ckpt_path=run.ckpt_path, weights_only=False)
    trainer.save_checkpoint(path)
    weights = arrays(dict(module.named_parameters()))
    return {"shadow": arrays(average.shadow), "weights": weights, "entries": set(own_state(module))}


def test_the_file_is_what_one_process_writes(pools: Pools, tmp_path: Path) -> None:
    """Averages of all layers; changes of ``on_save_checkpoint`` on every stage; figures come back to their stage."""
    run = dataclasses.replace(RUN, module=Adds)
    one = pools.run(1, averaged, dataclasses.replace(run, strategy="sync", options={"micro_batches": 2}), 1,
                    str(tmp_path / "one.ckpt"))  # fmt: skip
    many = pools.run(3, averaged, dataclasses.replace(run, strategy="sync"), 1, str(tmp_path / "many.ckpt"))
    single, file = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("one", "many"))
    assert many[0]["file"].keys() == one[0]["file"].keys()
    assert file.keys() == single.keys()
    assert list(file["norms"]) == list(single["norms"])
    assert file["state_dict"].keys() == single["state_dict"].keys()
    assert all(tensor.dtype == torch.float16 for tensor in file["state_dict"].values())
    figures = file["callbacks"]["Figures"]
    assert (figures["stage"], figures["list"], figures["alike"]) == (2, ["x", "x"], 7)
    assert list(figures["array"]) == [2, 2]

    own = pools.run(3, figures_again, dataclasses.replace(run, ckpt_path=str(tmp_path / "many.ckpt")))
    assert [state["stage"] for state, _, _ in own] == [2, 1, 0]
    assert [list(state["array"]) for state, _, _ in own] == [[2, 2], [1, 1], [0, 0]]
    assert [len(state["list"]) for state, _, _ in own] == [2, 1, 0]
    assert [set(found) ^ set(entries) for _, found, entries in own] == [set()] * 3

    texts = pools.run(2, warnings_of, dataclasses.replace(run, ckpt_path=str(tmp_path / "many.ckpt")))[0]
    assert len([text for text in texts if "['Figures']['stage']" in text and "partition=[3, 3, 3]" in text]) == 1


def figures_again(run: Run) -> tuple[Any, Any, Any]:
    """What a resumed run gets back."""
    figures, module = Figures(), run.module(run)
    figures.on_train_end = lambda *_: None  # type: ignore[method-assign]
    trainer = make_trainer(run, max_epochs=1, callbacks=[figures])
    trainer.fit(module, loader(run), ckpt_path=run.ckpt_path, weights_only=False)
    return figures.state, module.found, list(dict(module.named_parameters()))


def warnings_of(run: Run) -> list[str]:
    """What a run on other stages says of values that it cannot assign."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figures_again(run)
    return [str(warning.message) for warning in caught]


def test_uniting() -> None:
    """Keys of any stage; a value that differs is the last stage's, and each difference gives back what a stage had."""
    stages = [
        {"a": {"x": torch.ones(2), "y": 1}, "only first": [1], 3: np.arange(2)},
        {"a": {"z": torch.zeros(2), "y": 2}, 3: np.arange(2), "object": object()},
    ]
    union = unite([sendable(stage) for stage in stages])
    assert list(union.value["a"]) == ["x", "y", "z"]
    assert union.value["a"]["y"] == 2
    lost: list[str] = []
    value = readable(union.value, stages[1], "state", lost)
    assert value["object"] is stages[1]["object"]
    assert not lost
    for stage, difference in zip(stages, union.differences):
        again = own_again(value, readable(difference))
        assert fingerprint(again) == fingerprint(stage)
    assert conflicts(union.differences) == ["['a']['y']"]
    elsewhere = Names({"z"}, {"x"})
    assert list(without(value, union.differences, elsewhere.is_elsewhere)["a"]) == ["y", "z"]
    readable(sendable({"o": object()}), None, "state", lost)
    assert lost == ["state['o'] (object)"]
    assert Names({"10.weight"}, {"0.weight"}).is_elsewhere("module.0.weight")
    assert not Names({"10.weight"}, {"0.weight"}).is_elsewhere("module.10.weight")
