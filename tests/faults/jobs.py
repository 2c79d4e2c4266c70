"""Jobs of the fault tests: trainings with the Trainer and with Fabric, all of which save checkpoints often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.faults.places import Places, watch_layers
from tests.helpers.cases import Case
from tests.helpers.fabric import Run as FabricRun
from tests.helpers.resumable import NumberedSamples, Showing, fit_showing
from tests.helpers.trainer import Run

TIMEOUT_SECONDS = 10.0
SAVING = {"save_last": True, "save_top_k": -1, "filename": "{step}"}


@dataclass(frozen=True)
class Job:
    """Training in several processes.

    Attributes:
        train: function of the places and a folder for checkpoints, which resumes from the last checkpoint and returns
            this rank's result: ``weights``, ``trails`` (name -> records in order), ``start`` and ``step``.
        save_every: number of steps between checkpoints.
    """

    name: str
    processes: int
    train: Callable[[Places, Path], dict[str, Any]]
    save_every: int = 2


class Placed(L.Callback):
    """Callback that visits places between batches, and remembers the step at which training began."""

    def __init__(self, places: Places) -> None:
        self._places, self.start = places, -1

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.start = trainer.global_step
        self._places.reach(self.start)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._places.reach(trainer.global_step)
        self._here()

    def _here(self, *_: Any) -> None:
        self._places.here("callback")

    on_train_batch_start = on_train_epoch_end = on_validation_batch_end = _here

    def on_save_checkpoint(self, *_: Any) -> None:
        self._places.here("save")

    def on_train_end(self, *_: Any) -> None:
        self._places.stop()


class PlacedModule(Showing):
    """Module that visits places in forwards, backwards and training steps."""

    def __init__(self, run: Run, places: Places) -> None:
        super().__init__(run)
        self._places = places
        watch_layers(self.model, places)  # type: ignore[arg-type]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._places.here("step")
        return super().training_step(batch, batch_idx)


class PlacedSamples(NumberedSamples):
    """Dataset that visits a place before it reads a sample."""

    def __init__(self, count: int, noisy: bool, places: Places) -> None:
        super().__init__(count, noisy)
        self._places = places

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._places.here("loader")
        return super().__getitem__(index)


@dataclass(frozen=True)
class ByTrainer:
    """Training with the Trainer, a kind of loader, and arguments of ModelCheckpoint.

    ``on_exception``: whether a checkpoint is saved after a failure as well.
    """

    run: Run
    kind: str
    saving: dict[str, Any] = field(default_factory=dict)
    on_exception: bool = False

    def __call__(self, places: Places, checkpoints: Path) -> dict[str, Any]:
        saving = {"dirpath": checkpoints} | SAVING | self.saving | {"save_on_exception": self.on_exception}
        callbacks: tuple[Any, ...] = ((ModelCheckpoint, saving),)
        if self.on_exception:
            callbacks += ((OnExceptionCheckpoint, {"dirpath": checkpoints}),)
        options = self.run.options | {"timeout": timedelta(seconds=TIMEOUT_SECONDS)}
        trainer = {"enable_checkpointing": True, **self.run.trainer, "logger": "list"}
        run = replace(self.run, callbacks=callbacks, options=options, trainer=trainer, ckpt_path="last")
        placed = Placed(places)
        report = fit_showing(
            run, self.kind, str(places.data), make=lambda run: PlacedModule(run, places), callbacks=[placed],
            samples=lambda count, noisy: PlacedSamples(count, noisy, places),
        )  # fmt: skip
        return {
            "weights": report["weights"], "start": placed.start, "step": report["global_step"],
            "trails": {"records": report["records"], "numbers": report["numbers"]},
        }  # fmt: skip


@dataclass(frozen=True)
class ByFabric:
    """Training with a user's own Fabric loop, which saves ``last.ckpt`` and resumes from it."""

    case: Case
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, places: Places, checkpoints: Path) -> dict[str, Any]:
        options = self.options | {"timeout": timedelta(seconds=TIMEOUT_SECONDS)}
        run = FabricRun(self.case, options=options)
        watch_layers([unit.module for unit in run.strategy.session.stage.units], places)  # type: ignore[union-attr]
        last = checkpoints / "last.ckpt"
        if last.exists():
            run.load(str(last))
        start, count = len(run.norms), len(self.case.mini_batches)
        for step in range(start, count):
            places.reach(step)
            places.here("callback")
            run.train(step, step + 1)
            if (step + 1) % 2 == 0:
                places.here("save")
                run.fabric.save(last, run.state)
        places.stop()
        result = run.result()
        return {
            "weights": result["weights"], "start": start, "step": count, "trails": {"losses": run.losses},
        }  # fmt: skip


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
