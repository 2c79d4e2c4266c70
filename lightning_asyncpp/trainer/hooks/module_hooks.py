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

from lightning.pytorch import Callback, LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torchmetrics import Metric

from lightning_asyncpp.core.ranks.agreement import agree_on_error, exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError, ConsequenceError
from lightning_asyncpp.trainer.logging.log_recorder import check_loggable, number

EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_WRAPPED_EPOCH_ENDS = (*EPOCH_ENDS, "on_predict_epoch_end")  # nothing can be logged in the last
_BATCH_ENDS = ("on_validation_batch_end", "on_test_batch_end")
_LOG = inspect.signature(LightningModule.log)
_SYNC = "sync"
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "min": min, "max": max}
_MOST_NAMED = 4
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")


class Replacement:
    """Takes the place of a method of a module; a copy of the module (that averages weights, say) has the method itself.

    Args:
        module: whose method it is; or a callback.
        name: of the method.
        function: what is called instead.
    """

    def __init__(self, module: LightningModule | Callback, name: str, function: Callable[..., Any]) -> None:
        self._module, self._name, self._function = module, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The method of the copy."""
        return getattr(type(self._module), self._name).__get__(memo.get(id(self._module), self._module))


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
        self._has_warned = False
        for name in _WRAPPED_EPOCH_ENDS:
            self._replace(name, functools.partial(self._end_epoch, name, getattr(module, name)))
        for name in _BATCH_ENDS:
            self._replace(name, functools.partial(self._end_batch, getattr(module, name)))

    def release(self) -> None:
        """Give the hooks back."""
        for name in (*_WRAPPED_EPOCH_ENDS, *_BATCH_ENDS):
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

    def _replace(self, name: str, function: Callable[..., None]) -> None:
        self._module.__dict__[name] = Replacement(self._module, name, function)

    def _end_batch(self, hook: Callable[..., None], *args: Any) -> None:
        # (outputs, batch, batch_idx), and with several loaders the index of this one.
        hook(*args)
        self._after_batch(args[2], args[3] if len(args) > 3 else 0)

    def _end_epoch(self, name: str, hook: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            hook()
        except ConsequenceError:
            raise  # nobody is left to agree with
        except Exception as caught:
            error = caught if self._mesh.is_last else _off_the_last_stage(name, caught)
        agree_on_error(self._mesh, error)
        recorded, self._recorded = self._recorded, []
        by_rank = [json.loads(text) for text in exchange(self._mesh, json.dumps(recorded))]
        self._warn_of_lost(name, by_rank)
        for fields in by_rank[0]:
            if reduction := fields.pop(_SYNC, None):
                fields["value"] = _REDUCTIONS[reduction](self._of_replicas(by_rank, fields["name"]))
            self._log(**fields, batch_size=1)

    def _warn_of_lost(self, hook: str, by_rank: list[list[dict[str, Any]]]) -> None:
        """Say once what other ranks logged under names that rank 0 does not log, such as statistics of their layers."""
        counted = {fields["name"] for fields in by_rank[0]}
        lost = {
            rank: names
            for rank, logged in enumerate(by_rank)
            if (names := [fields["name"] for fields in logged if fields["name"] not in counted])
        }
        if self._has_warned or not lost:
            return
        self._has_warned = True
        owners = "; ".join(
            f"{', '.join(names[:_MOST_NAMED])}{' and more' if len(names) > _MOST_NAMED else ''} by rank {rank} (stage"
            f" {self._mesh.stage_of(rank)})"
            for rank, names in list(lost.items())[:_MOST_NAMED]
        )
        rank_zero_warn(
            f"{hook}: not logged, because what rank 0 logs there counts for all ranks: {owners}. To log what other"
            " stages know, call torch.distributed.all_gather_object(parts, own) in this hook on every rank, and log"
            " what is in parts"
        )

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


def _off_the_last_stage(name: str, error: Exception) -> ConfigurationError:
    mend = ConfigurationError(
        f"{name} failed off the last stage ({type(error).__name__}: {error}). There *_step methods do not run to their"
        " end: what they collect in the module stays empty. Return early where nothing was collected, or log in the"
        " step (self.log averages over the epoch); what rank 0 logs in this hook counts for all ranks"
    )
    mend.__cause__ = error
    return mend
