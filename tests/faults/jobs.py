"""Trainings in which something goes wrong: by the Trainer and by Fabric; all save often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.faults.places import Places, watch_layers
from tests.helpers.cases import Case
from tests.helpers.fabric import Run as FabricRun
from tests.helpers.resumable import NumberedSamples, Showing, fit_showing
from tests.helpers.trainer import Run

TIMEOUT_SECONDS = 10.0
SAVING = {"save_last": True, "save_top_k": -1, "filename": "{step}", "every_n_train_steps": 2}


class Here(NamedTuple):
    """What a rank is given.

    Attributes:
        places: where something may go wrong.
        checkpoints: a folder for them.
        data: a folder with a litdata dataset.
        reached: a file for the number of steps that were done.
    """

    places: Places
    checkpoints: Path
    data: Path
    reached: Path


@dataclass(frozen=True)
class Job:
    """A training of some processes.

    Attributes:
        processes: how many.
        train: trains, from the last checkpoint if there is one, and returns what this rank came to: ``weights``,
            ``trails`` (what happened, in order, by sort), ``start`` and ``step`` (with which it began and ended).
        save_every: steps between checkpoints.
    """

    name: str
    processes: int
    train: Callable[[Here], dict[str, Any]]
    save_every: int = 2


# -- the Trainer --------------------------------------------------------------------------------------------------


class Placed(L.Callback):
    """Lets the moments between batches be places; remembers where training began."""

    def __init__(self, here: Here) -> None:
        self._here, self.start = here, -1

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.start = trainer.global_step
        self._here.reached.write_text(str(self.start))

    def on_train_batch_start(self, *_: Any) -> None:
        self._here.places.here("callback")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._here.reached.write_text(str(trainer.global_step))
        self._here.places.here("callback")

    def on_train_epoch_end(self, *_: Any) -> None:
        self._here.places.here("callback")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._here.places.here("callback")

    def on_save_checkpoint(self, *_: Any) -> None:
        self._here.places.here("save")

    def on_train_end(self, *_: Any) -> None:
        self._here.places.stop()


class PlacedModule(Showing):
    """Lets forwards, backwards, steps and updates be places."""

    def __init__(self, run: Run, places: Places) -> None:
        super().__init__(run)
        self._places = places
        watch_layers(self.model, places)  # type: ignore[arg-type]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._places.here("step")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
        optimizer.register_step_pre_hook(lambda *_: self._places.here("optimizer"))
        return configured


class PlacedSamples(NumberedSamples):
    """Lets the reading of a sample be a place."""

    def __init__(self, count: int, noisy: bool, places: Places) -> None:
        super().__init__(count, noisy)
        self._places = places

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._places.here("loader")
        return super().__getitem__(index)


@dataclass(frozen=True)
class ByTrainer:
    """Trains with the Trainer.

    Attributes:
        run: the run, without what depends on the folder.
        kind: of the loader.
        saving: arguments of ModelCheckpoint.
        on_exception: the user wants a checkpoint after a failure, too.
    """

    run: Run
    kind: str
    saving: dict[str, Any] = field(default_factory=dict)
    on_exception: bool = False

    def __call__(self, here: Here) -> dict[str, Any]:
        saving = {"dirpath": here.checkpoints} | SAVING | self.saving | {"save_on_exception": self.on_exception}
        callbacks: tuple[Any, ...] = ((ModelCheckpoint, saving),)
        if self.on_exception:
            callbacks += ((OnExceptionCheckpoint, {"dirpath": here.checkpoints}),)
        options = self.run.options | {"timeout": timedelta(seconds=TIMEOUT_SECONDS)}
        trainer = {"enable_checkpointing": True, **self.run.trainer, "logger": "list"}
        run = replace(self.run, callbacks=callbacks, options=options, trainer=trainer, ckpt_path="last")
        placed = Placed(here)
        report = fit_showing(
            run, self.kind, str(here.data), make=lambda run: PlacedModule(run, here.places), callbacks=[placed],
            samples=lambda count, noisy: PlacedSamples(count, noisy, here.places),
        )  # fmt: skip
        return {
            "weights": report["weights"], "start": placed.start, "step": report["global_step"],
            "trails": {"records": report["records"], "numbers": report["numbers"]},
        }  # fmt: skip


# -- Fabric -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByFabric:
    """A loop of the user's own, which saves ``last.ckpt`` and begins from it."""

    case: Case
    options: dict[str, Any] = field(default_factory=dict)
    save_every: int = 2

    def __call__(self, here: Here) -> dict[str, Any]:
        options = self.options | {"timeout": timedelta(seconds=TIMEOUT_SECONDS)}
        run = FabricRun(self.case, options=options)
        watch_layers([unit.module for unit in run.strategy.session.stage.units], here.places)  # type: ignore[union-attr]
        run.optimizer.register_step_pre_hook(lambda *_: here.places.here("optimizer"))
        last = here.checkpoints / "last.ckpt"
        start = 0
        if last.exists():
            state = run.state
            run.fabric.load(last, state)
            start = state["step"]
        count = len(self.case.mini_batches)
        for step in range(start, count):
            here.reached.write_text(str(step))
            here.places.here("callback")
            run.train(step, step + 1)
            if (step + 1) % self.save_every == 0:
                here.places.here("save")
                run.fabric.save(last, {**run.state, "step": step + 1})
        here.places.stop()
        result = run.result()
        return {
            "weights": result["weights"], "start": start, "step": count, "trails": {"losses": run.losses},
        }  # fmt: skip


# -- which --------------------------------------------------------------------------------------------------------

_RUN = Run(
    Showing, "default", dropout=0.2, optimizer="muon", error_feedback=True, scheduler="decay-step", samples=37,
    trainer={"max_epochs": 2, "gradient_clip_val": 0.5},
)  # fmt: skip
_VALIDATED = {**_RUN.trainer, "val_check_interval": 2, "num_sanity_val_steps": 1}
_SHARDED = {"state_dict_type": "sharded"}
_BEHIND = {"async_checkpoints": True}
_CASE = Case(4, optimizer="muon", error_feedback=1.0, max_norm=0.3, scheduler=True, dropout=0.2, batch_sizes=(8,) * 12)


def _trainer(name: str, processes: int, kind: str, run: Run = _RUN, every: int = 2, **more: Any) -> Job:
    more["saving"] = {"every_n_train_steps": every} | more.get("saving", {})
    run = replace(run, shuffle="stateful" not in kind)
    return Job(name, processes, ByTrainer(run, kind, **more), every)


JOBS = {
    job.name: job
    for job in (
        _trainer("plain", 2, "stateful"),
        _trainer("validated", 2, "litdata", replace(_RUN, trainer=_VALIDATED, val_samples=(9, 5))),
        _trainer("sharded", 3, "stateful noisy", replace(_RUN, options=_SHARDED)),
        _trainer("behind", 2, "stateful", replace(_RUN, options=_SHARDED | _BEHIND), every=1, on_exception=True),
        _trainer("whole-behind", 2, "litdata", replace(_RUN, options=_BEHIND)),
        _trainer("newest", 2, "stateful", every=1, on_exception=True, saving={"save_top_k": 1}),
        _trainer("sync", 3, "stateful noisy", replace(_RUN, strategy="sync", options={"lookahead": 1})),
        _trainer("replicas", 4, "litdata", replace(_RUN, options={"data_parallel_size": 2} | _SHARDED)),
        _trainer("workers", 2, "stateful workers", replace(_RUN, options={"staleness": "least"}), every=3),
        Job("fabric", 2, ByFabric(_CASE)),
        Job("fabric-sharded", 3, ByFabric(replace(_CASE, tied=True, routed=True), _SHARDED | _BEHIND)),
    )
}
