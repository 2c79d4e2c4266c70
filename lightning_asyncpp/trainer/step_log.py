"""Logging of values from steps and hooks: only the last stage calls Lightning's ``self.log``.

Rank 0 is the last stage of the first replica, so its loggers, progress bars and callbacks work as usual. All ranks
receive rank 0's ``callback_metrics`` when the pipeline drains (finishes all microbatches in flight), since callbacks
may decide by these metrics. At the end of an epoch or of an evaluation's loader, all ranks receive the values for that
epoch or loader, reduced over replicas. ``self.log`` does not communicate, since some ranks may not call it.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import lightning as L
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.ranks.agreement import all_gather_object, broadcast
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.updates.update import Update
from lightning_asyncpp.trainer import private

EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_FLAGS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size",
)  # fmt: skip


class Replacement(functools.partial):
    """Replacement of a module's method; copies of the module (averages of weights) keep the original method.

    After ``Replacement(function).of(module, name)`` the function is called instead of the method.
    """

    def of(self, module: LightningModule, name: str) -> Replacement:
        """Replace the method ``name`` of ``module``."""
        self.module, self.name = module, name
        module.__dict__[name] = self
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the original method, bound to the copy."""
        return getattr(type(self.module), self.name).__get__(memo.get(id(self.module), self.module))


@dataclass
class _Logged:
    """Values that the microbatches of a batch logged under a name.

    Attributes:
        options: arguments of ``self.log``.
        metric: torchmetrics object that was logged, if any; Lightning computes the value of the epoch with it.
        values: values of the microbatches, on the device where they were computed.
        weights: weights of the values.
    """

    options: dict[str, Any]
    metric: Metric | None = None
    values: list[Tensor | float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add the value of a microbatch; a mean ignores values of weight 0."""
        if weight or self.reduction != "mean":
            self.values.append(value)
            self.weights.append(weight)

    @property
    def reduction(self) -> str:
        """Name of the reduction of the values; ``"mean"`` for unknown ones, which Lightning refuses."""
        given = self.options.get("reduce_fx", "mean")
        name = str(given if isinstance(given, str) else getattr(given, "__name__", "")).lower()
        return name if name in _REDUCTIONS else "mean"

    def together(self) -> tuple[Tensor, Tensor]:
        """Return the value of the whole batch and its weight, on the device of the values."""
        device = next((value.device for value in self.values if isinstance(value, Tensor)), torch.device("cpu"))
        wide: dict[str, Any] = {"dtype": torch.float32 if device.type == "mps" else torch.float64, "device": device}
        values = torch.stack([torch.as_tensor(value, **wide).reshape(()) for value in self.values])
        weights = torch.tensor(self.weights, dtype=wide["dtype"]).to(device, non_blocking=True)
        weights = weights.masked_fill(values.isnan(), 0.0)
        return _REDUCTIONS[self.reduction](values, weights).float(), weights.sum().float()


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of values; the weight of a NaN must be 0."""
    return (values * weights).masked_fill(values.isnan(), 0.0).sum() / weights.sum()


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "sum": lambda values, _: values.sum(),
    "min": lambda values, _: values.min(),
    "max": lambda values, _: values.max(),
}


class StepLog:
    """Replacement of ``self.log`` that collects the values of microbatches, and logs them once per batch.

    Args:
        session: the pipeline.

    Attributes:
        batch_weight: weight of the newest batch.
    """

    def __init__(self, session: PipelineSession) -> None:
        self.session = session
        self.batch_weight = 1.0
        self._trainer: L.Trainer | None = None  # None while no trainer runs
        self._batch: dict[str, _Logged] = {}
        self._rows: dict[str, _Logged] | None = None  # values of the running step; None outside of steps
        self._weight = 0.0
        self._counted: list[tuple[int, dict[str, float]]] = []  # mini-batch, and the statistics of its layers
        self._for_bar: deque[tuple[str, Reading]] = deque()  # values on their way from the device
        self._epochs_for_bar: set[str] = set()

    def connect(self, trainer: L.Trainer, module: LightningModule) -> None:
        """Replace ``module.log``, and make torchmetrics synchronise over the last stages only.

        Args:
            trainer: trainer that runs the module.
            module: module that logs.
        """
        self.disconnect()
        assert self.session.mesh is not None
        self._mesh: Mesh = self.session.mesh
        self._trainer, self._module = trainer, module
        self._log: Callable[..., None] = module.log
        Replacement(self._take).of(module, "log")
        for name in EPOCH_ENDS:
            Replacement(self._end_epoch, name, getattr(module, name)).of(module, name)
        # Lightning's advice to use sync_dist=True does not apply: share_epoch() reduces over replicas.
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*when logging on epoch level.*")
        group = self._mesh.groups.last_stages if self._mesh.groups is not None else None
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            metric.process_group = group
            metric.sync_on_compute = group is not None
            if group is None:  # a metric adopts sync_on_compute in forward(), but not in update()
                metric.distributed_available_fn = _not_distributed
            metric.dist_sync_on_step = False

    def disconnect(self) -> None:
        """Restore ``module.log`` and the module's hooks."""
        if self._trainer is not None:
            for name in ("log", *EPOCH_ENDS):
                self._module.__dict__.pop(name, None)
        self._trainer = None
        self._batch.clear()
        self._counted.clear()
        self._for_bar.clear()
        self._epochs_for_bar.clear()

    # -- steps ----------------------------------------------------------------------------------------------------

    def recording(self, step: Callable[[Any], Any]) -> Callable[[Any, float | None], Any]:
        """Wrap a step so that logged values are kept with the microbatch's weight, or dropped if the weight is None."""

        def run(microbatch: Any, weight: float | None) -> Any:
            self._rows, self._weight = {} if weight is None else self._batch, weight or 0.0
            try:
                return step(microbatch)
            finally:
                self._rows = None

        return run

    def log_batch(self, weight: float) -> None:
        """Log the values of a batch; call this inside a Lightning step, whose rules for logging then apply.

        Args:
            weight: weight of the batch.
        """
        self.batch_weight = weight
        self._show_in_bar()
        batch, self._batch = self._batch, {}
        for name, logged in batch.items():
            value, size = logged.together() if logged.values else (None, None)
            if (metric := logged.metric) is not None:
                if value is not None:  # the metric itself holds only the value of the last microbatch
                    vars(metric)["_forward_cache"] = value
                self._log(name, metric, **logged.options)
            elif value is not None:
                options = {**logged.options, "batch_size": size}
                self._log(name, value, **(self._without_bar(name, value, options) if _is_late(value) else options))

    def _without_bar(self, name: str, value: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options without ``prog_bar``, and show the value in the bar once the host has it.

        To show it at once, the progress bar would wait for the device.
        """
        assert self._trainer is not None
        if not options.get("prog_bar") or options.get("on_step") is False or not self._trainer.training:
            return options
        if options.get("on_epoch"):
            self._epochs_for_bar.add(f"{name}_epoch")
            name = f"{name}_step"
        self._for_bar.append((name, Reading([value])))
        return {**options, "prog_bar": False}

    def _show_in_bar(self) -> None:
        """Show the values that have arrived from the device in the progress bar."""
        assert self._trainer is not None
        while self._for_bar and self._for_bar[0][1].is_there():
            name, reading = self._for_bar.popleft()
            self._trainer.progress_bar_metrics[name] = reading.get()[0][0]

    def receive(self, updates: Sequence[Update]) -> None:
        """Keep the layers' statistics of updates until :meth:`end_batch`."""
        for update in updates:
            if update.totals.weight and len(update.totals.statistics):
                counted = self.session.whole_model.statistics.metrics(update.totals.statistics)
                self._counted.append((update.mini_batch, counted))

    def end_batch(self) -> None:
        """Log the layers' statistics at the end of a batch."""
        for name, value in self._counted[-1][1].items() if self._counted and self._mesh.is_last else ():
            self._log(name, torch.tensor(value), logger=False, on_step=True, on_epoch=False)
        self.log_counted()

    def log_counted(self) -> None:
        """Send the loggers the layers' statistics of every ``log_every_n_steps``-th step, each with its step."""
        trainer = self._trainer
        if trainer is None or not self._counted:
            return
        engine = self.session.running()
        first, every = trainer.global_step - engine.mini_batch, trainer.log_every_n_steps  # type: ignore[attr-defined]
        for mini_batch, counted in self._counted:
            due = every and (first + mini_batch + 1) % every == 0
            for logger in trainer.loggers if due and self._mesh.rank == 0 else ():
                logger.log_metrics({"epoch": trainer.current_epoch, **counted}, step=first + mini_batch)
        self._counted.clear()

    def _take(self, name: str, value: Any, *flags: Any, **options: Any) -> None:
        """Take a call of ``module.log``; stages before the last one log nothing."""
        if not self._mesh.is_last:
            return
        options.update(zip(_FLAGS, flags))
        for implied in ("sync_dist", "sync_dist_group"):
            options.pop(implied, None)
        metric = value if isinstance(value, Metric) else None
        number: Any = value if metric is None else metric._forward_cache
        is_number = number.numel() == 1 if isinstance(number, Tensor) else isinstance(number, Number)
        if self._rows is None or (metric is None and not is_number):
            self._log(name, value, **options)
            return
        logged = self._rows.setdefault(name, _Logged(options, metric))
        if is_number:
            size = options.get("batch_size")  # None from log_dict()
            weight = self._weight if size is None else size
            logged.add(number.detach() if isinstance(number, Tensor) else number, weight)

    # -- what all ranks know --------------------------------------------------------------------------------------

    def share_metrics(self) -> None:
        """Broadcast rank 0's ``callback_metrics`` to all ranks; a blocking collective."""
        if self._trainer is None or self._mesh.world_size == 1:
            return
        known = self._trainer.callback_metrics  # on all ranks: it may compute torchmetrics, a collective call
        own = {} if self._mesh.rank else {name: value.detach().cpu() for name, value in known.items()}
        received = broadcast(self._mesh, own, source=0)
        if self._mesh.rank:
            known.clear()
            known.update(received)
            private.set_step_values(self._trainer, known)

    def share_epoch(self, hook: str = "") -> None:
        """Reduce the values of an epoch, or of a loader, over replicas, and set them on all ranks.

        This is a blocking collective.

        Args:
            hook: beginning of the names of the hooks whose values are shared.
        """
        if self._trainer is None:
            return
        if self._mesh.world_size > 1:
            own = private.epoch_values(self._trainer, hook) if self._mesh.is_last else []
            of_replicas: dict[str, list[private.EpochValue]] = {}
            for row in itertools.chain.from_iterable(all_gather_object(self._mesh, own)):
                of_replicas.setdefault(row.key, []).append(row)
            for rows in of_replicas.values():
                private.set_epoch_value(self._trainer, rows[0], _over_replicas(rows))
        if self._trainer.training:  # a validation in mid-epoch ends before them
            for name in self._epochs_for_bar:
                self._trainer.progress_bar_metrics[name] = float(self._trainer.callback_metrics[name])
            self._epochs_for_bar.clear()

    def _end_epoch(self, name: str, hook: Callable[[], None]) -> None:
        """Run the module's hook at the end of an epoch, then share the values before callbacks monitor them."""
        hook()
        self.share_epoch(name)


def _over_replicas(rows: list[private.EpochValue]) -> Tensor:
    first = rows[0]
    if first.weight is None:
        return first.value
    values = torch.stack([row.value.double() for row in rows])
    if first.options["reduce_fx"] == "mean":
        value = values.sum() / torch.stack([torch.as_tensor(row.weight).double() for row in rows]).sum()
    else:
        value = _REDUCTIONS[first.options["reduce_fx"]](values, values)
    return value.to(first.value.dtype)


def _is_late(value: Tensor) -> bool:
    """Return whether the host would have to wait for a value."""
    return value.is_cuda


def _not_distributed() -> bool:
    return False
