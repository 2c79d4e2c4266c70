"""What steps and hooks log: the last stage calls Lightning's own ``self.log``; all ranks learn it where they decide.

Rank 0 is the last stage of the first replica, so its loggers, bars and callbacks have what Lightning gives them. Others
are told its ``callback_metrics`` where the pipeline drains, and the values of a whole epoch (of an evaluation's loader)
at its end, which replicas put together. Nothing is exchanged inside ``self.log``: some ranks may not call it.
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
from lightning_asyncpp.core.ranks.agreement import broadcast, exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.updates.mini_batch import Update
from lightning_asyncpp.trainer import private

EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group")


class Replacement(functools.partial):
    """Takes the place of a method of a module; a copy of the module (that averages weights, say) has the method itself.

    ``Replacement(function).of(module, name)``: it is called instead.
    """

    def of(self, module: LightningModule, name: str) -> Replacement:
        """Stand for the method ``name`` of ``module``."""
        self.module, self.name = module, name
        module.__dict__[name] = self
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The method of the copy."""
        return getattr(type(self.module), self.name).__get__(memo.get(id(self.module), self.module))


@dataclass
class _Logged:
    """What the microbatches of a batch logged under a name.

    Attributes:
        options: arguments of ``self.log``.
        metric: the torchmetrics object that was logged, if any; its epoch is Lightning's and its own.
        values: of the microbatches, where they were computed.
        weights: what each of them stands for.
    """

    options: dict[str, Any]
    metric: Metric | None = None
    values: list[Tensor | float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add the value of a microbatch; one without weight has no mean."""
        if weight or self.reduction != "mean":
            self.values.append(value)
            self.weights.append(weight)

    @property
    def reduction(self) -> str:
        """How values are put together; what is none of these, Lightning refuses."""
        given = self.options.get("reduce_fx", "mean")
        name = str(given if isinstance(given, str) else getattr(given, "__name__", "")).lower()
        return name if name in _REDUCTIONS else "mean"

    def together(self) -> tuple[Tensor, Tensor]:
        """The value of the whole batch and what it stands for, where the values are."""
        device = next((value.device for value in self.values if isinstance(value, Tensor)), torch.device("cpu"))
        wide: dict[str, Any] = {"dtype": torch.float32 if device.type == "mps" else torch.float64, "device": device}
        values = torch.stack([torch.as_tensor(value, **wide).reshape(()) for value in self.values])
        weights = torch.tensor(self.weights, dtype=wide["dtype"]).to(device, non_blocking=True)
        weights = weights.masked_fill(values.isnan(), 0.0)
        return _REDUCTIONS[self.reduction](values, weights).float(), weights.sum().float()


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of values that are not NaN, which have no weight."""
    return (values * weights).masked_fill(values.isnan(), 0.0).sum() / weights.sum()


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "sum": lambda values, _: values.sum(),
    "min": lambda values, _: values.min(),
    "max": lambda values, _: values.max(),
}


class StepLog:
    """Stands between ``self.log`` and Lightning: what microbatches log becomes one call per batch, on the last stage.

    Args:
        session: the pipeline whose steps they are.

    Attributes:
        batch_weight: what the newest batch weighs.
    """

    def __init__(self, session: PipelineSession) -> None:
        self.session = session
        self.batch_weight = 1.0
        self._trainer: L.Trainer | None = None  # while one runs
        self._batch: dict[str, _Logged] = {}
        self._rows: dict[str, _Logged] | None = None  # what a step records into; None outside of steps
        self._weight = 0.0
        self._counted: list[tuple[int, dict[str, float]]] = []  # mini-batch, and what its layers counted
        self._for_bar: deque[tuple[str, Reading]] = deque()  # values on their way from the device
        self._epochs_for_bar: set[str] = set()

    def connect(self, trainer: L.Trainer, module: LightningModule) -> None:
        """Take the place of ``module.log`` and let torchmetrics synchronise over the last stages alone.

        Args:
            trainer: that runs the module.
            module: whose metrics they are.
        """
        self.disconnect()
        assert self.session.mesh is not None
        self._mesh: Mesh = self.session.mesh
        self._trainer, self._module = trainer, module
        self._log: Callable[..., None] = module.log
        Replacement(self._take).of(module, "log")
        for name in EPOCH_ENDS:
            Replacement(self._end_epoch, name, getattr(module, name)).of(module, name)
        # Replicas are put together here, where no rank can be missing.
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*when logging on epoch level.*")
        group = self._mesh.groups.last_stages if self._mesh.groups is not None else None
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            metric.process_group = group
            metric.sync_on_compute = group is not None
            if group is None:  # a metric that is only updated ignores sync_on_compute
                metric.distributed_available_fn = _not_distributed
            metric.dist_sync_on_step = False

    def disconnect(self) -> None:
        """Give ``module.log`` and the module's hooks back."""
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
        """The step of a microbatch, whose logged values are kept; without a weight it does not run to its end."""

        def run(microbatch: Any, weight: float | None) -> Any:
            self._rows, self._weight = {} if weight is None else self._batch, weight or 0.0
            try:
                return step(microbatch)
            finally:
                self._rows = None

        return run

    def log_batch(self, weight: float) -> None:
        """Log, in the hook of the step, what its microbatches logged.

        Args:
            weight: of the batch.
        """
        self.batch_weight = weight
        self._show_in_bar()
        batch, self._batch = self._batch, {}
        for name, logged in batch.items():
            value, size = logged.together() if logged.values else (None, None)
            if (metric := logged.metric) is not None:
                if value is not None:  # its own is that of the last microbatch
                    vars(metric)["_forward_cache"] = value
                self._log(name, metric, **logged.options)
            elif value is not None:
                options = {**logged.options, "batch_size": size}
                self._log(name, value, **(self._without_bar(name, value, options) if _is_late(value) else options))

    def _without_bar(self, name: str, value: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """Keep a step's value from the progress bar, which would wait for the device, until the host has it."""
        assert self._trainer is not None
        if not options.get("prog_bar") or options.get("on_step") is False or not self._trainer.training:
            return options
        if options.get("on_epoch"):
            self._epochs_for_bar.add(f"{name}_epoch")
            name = f"{name}_step"
        self._for_bar.append((name, Reading([value])))
        return {**options, "prog_bar": False}

    def _show_in_bar(self) -> None:
        """Give the bar what has come from the device."""
        assert self._trainer is not None
        while self._for_bar and self._for_bar[0][1].is_there():
            name, reading = self._for_bar.popleft()
            self._trainer.progress_bar_metrics[name] = reading.get()[0][0]

    def receive(self, updates: Sequence[Update]) -> None:
        """Keep what layers counted in the batches of updates, until :meth:`end_batch`."""
        for update in updates:
            if update.message.weight and len(update.message.statistics):
                counted = self.session.whole_model.statistics.metrics(update.message.statistics)
                self._counted.append((update.mini_batch, counted))

    def end_batch(self) -> None:
        """Log, at the end of a batch, what layers counted."""
        for name, value in self._counted[-1][1].items() if self._counted and self._mesh.is_last else ():
            self._log(name, torch.tensor(value), logger=False, on_step=True, on_epoch=False)
        self.log_counted()

    def log_counted(self) -> None:
        """Send the loggers what layers counted, each as of the step of its own mini-batch."""
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
        """What ``module.log`` does while the strategy runs: nothing off the last stage."""
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
        """Let all ranks have rank 0's ``callback_metrics``; a blocking collective."""
        if self._trainer is None or self._mesh.world_size == 1:
            return
        known = self._trainer.callback_metrics  # replicas compute them together
        own = {} if self._mesh.rank else {name: value.detach().cpu() for name, value in known.items()}
        told = broadcast(self._mesh, own, source=0)
        if self._mesh.rank:
            known.clear()
            known.update(told)
            private.set_step_values(self._trainer, known)

    def share_epoch(self, hook: str = "") -> None:
        """Put together what the last stages logged for an epoch, or a loader, and log it on all ranks.

        A blocking collective.

        Args:
            hook: only what was logged in hooks that begin so.
        """
        if self._trainer is None:
            return
        if self._mesh.world_size > 1:
            own = private.epoch_values(self._trainer, hook) if self._mesh.is_last else []
            of_replicas: dict[str, list[private.EpochValue]] = {}
            for row in itertools.chain.from_iterable(exchange(self._mesh, own)):
                of_replicas.setdefault(row.key, []).append(row)
            for rows in of_replicas.values():
                private.set_epoch_value(self._trainer, rows[0], _over_replicas(rows))
        for name in self._epochs_for_bar:
            self._trainer.progress_bar_metrics[name] = float(self._trainer.callback_metrics[name])
        self._epochs_for_bar.clear()

    def _end_epoch(self, name: str, hook: Callable[[], None]) -> None:
        """Run a hook of the module at the end of an epoch, the last but for those of callbacks that decide."""
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
    """Whether the host would wait for a value."""
    return value.is_cuda


def _not_distributed() -> bool:
    return False
