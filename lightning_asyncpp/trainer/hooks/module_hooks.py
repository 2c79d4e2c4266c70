"""Hooks of a LightningModule that end a batch or an epoch, and what is exchanged between the ranks after them.

Lightning calls the module's hook after those of all callbacks but the ones that monitor a metric: the moment to let all
ranks know what was logged. Nothing is exchanged inside ``self.log``, which may be called on some ranks only.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from statistics import fmean
from typing import Any

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer.logging.log_recorder import check_loggable, number

EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_BATCH_ENDS = ("on_validation_batch_end", "on_test_batch_end")
_LOG = inspect.signature(LightningModule.log)
_SYNC = "sync"
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "min": min, "max": max}
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")


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


class ModuleHooks:
    """Stands around the hooks of a module until :meth:`release`.

    After an epoch's end it logs on every rank what rank 0 logged there; off the last stage no step ran to its end, so
    what a module collected there is not what the epoch brought.

    Args:
        module: whose hooks they are.
        mesh: this rank's place, connected.
        log: ``LightningModule.log`` of the module.
        after_batch: called after the hook at the end of an evaluation's batch, with its index and its loader's.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        log: Callable[..., None],
        after_batch: Callable[[int, int], None],
    ) -> None:
        self._module, self._mesh, self._log, self._after_batch = module, mesh, log, after_batch
        self._recorded: list[dict[str, Any]] = []
        for names, end in ((EPOCH_ENDS, self._end_epoch), (_BATCH_ENDS, self._end_batch)):
            for name in names:
                Replacement(end, getattr(module, name)).of(module, name)

    def release(self) -> None:
        """Give the hooks back."""
        for name in (*EPOCH_ENDS, *_BATCH_ENDS):
            self._module.__dict__.pop(name, None)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Take the place of ``LightningModule.log`` at the end of an epoch.

        Raises:
            ConfigurationError: the value is no number.
        """
        given = _LOG.bind(self._module, *args, **kwargs).arguments
        name, value = given["name"], given["value"]
        if isinstance(value, Metric):
            value = _computed(name, value) if self._mesh.is_last else 0.0
        check_loggable(name, value)
        flags = {flag: given[flag] for flag in _FLAGS if flag in given}
        if given.get("sync_dist"):
            flags[_SYNC] = _reduction(name, given.get("reduce_fx", "mean"))
        self._recorded.append({"name": name, "value": float(value), **flags})

    def _end_batch(self, hook: Callable[..., None], *args: Any) -> None:
        # (outputs, batch, batch_idx), and with several loaders the index of this one.
        hook(*args)
        self._after_batch(args[2], args[3] if len(args) > 3 else 0)

    def _end_epoch(self, hook: Callable[[], None]) -> None:
        hook()
        recorded, self._recorded = self._recorded, []
        by_rank = [json.loads(text) for text in exchange(self._mesh, json.dumps(recorded))]
        for fields in by_rank[0]:
            if reduction := fields.pop(_SYNC, None):
                fields["value"] = _REDUCTIONS[reduction](self._of_replicas(by_rank, fields["name"]))
            self._log(**fields, batch_size=1)

    def _of_replicas(self, by_rank: list[list[dict[str, Any]]], name: str) -> list[float]:
        """What the last stages of all replicas logged under a name."""
        last = (by_rank[self._mesh.rank_of(self._mesh.num_stages - 1, r)] for r in range(self._mesh.num_replicas))
        return [fields["value"] for logged in last for fields in logged if fields["name"] == name]


def _reduction(name: str, given: Any) -> str:
    """How values of replicas are put together.

    Raises:
        ConfigurationError: in no way that is known here.
    """
    reduction = given if isinstance(given, str) else getattr(given, "__name__", "")
    if reduction.lower() not in _REDUCTIONS:
        raise ConfigurationError(
            f"self.log({name!r}, sync_dist=True, reduce_fx={given!r}): values of replicas are put together by"
            f" {', '.join(_REDUCTIONS)}; gather them with self.all_gather, and log what you make of them"
        )
    return reduction.lower()


def _computed(name: str, metric: Metric) -> float:
    value = metric.compute()
    metric.reset()
    return number(name, value)
