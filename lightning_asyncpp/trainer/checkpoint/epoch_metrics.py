"""Metrics in the middle of an epoch: what Lightning knows so far, and the module's torchmetrics objects.

The mean over an epoch is made of every batch since its beginning; without this a training that is resumed in the middle
would log the mean of the rest. Lightning's checkpoints do not hold it, and the objects' own ``state_dict`` leaves it
out; all of it is known by private names.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector import result as lightnings
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.private_names import required

_LOGGED_PURPOSE = "go on with an epoch's metrics after a resume"
_FIELDS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
_SYNC = {"should": "_should", "rank_zero_only": "rank_zero_only"}
_VALUES = ("value", "cumulated_batch_size")
_NEWEST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_METRICS_PURPOSE = "go on with a torchmetrics object after a resume"
_BESIDE_STATES: dict[type[nn.Module], tuple[str, ...]] = {
    MinMaxMetric: ("min_val", "max_val"),
    Running: ("_num_vals_seen",),
}
"""What wrappers of torchmetrics keep in attributes that are no states."""


def logged_state(trainer: Trainer) -> dict[str, Any]:
    """The metrics of the training epoch that runs, and the newest value of every metric: numbers, tensors and strings.

    Raises:
        PrivateNameError: Lightning keeps them elsewhere by now.
    """
    connector = required(trainer, "_logger_connector", _LOGGED_PURPOSE)
    results = required(trainer.fit_loop.epoch_loop, "_results", _LOGGED_PURPOSE)
    return {
        "epoch": {key: _entry(metric) for key, metric in results.items() if _is_kept(metric)},
        "evaluated": _objects(required(trainer.fit_loop.epoch_loop.val_loop, "_results", _LOGGED_PURPOSE)),
        "newest": {name: dict(required(connector, name, _LOGGED_PURPOSE)) for name in _NEWEST},
        "hook": required(connector, "_current_fx", _LOGGED_PURPOSE),
    }


def names_of_spent(state: Mapping[str, Any], in_epoch: bool) -> list[str]:
    """The objects of the module that Lightning would reset before they are used again: they begin anew after a resume.

    Args:
        state: what :func:`logged_state` returned.
        in_epoch: whether the training's epoch goes on. A validation that was under way begins again.
    """
    trained = [entry["meta"]["metric_attribute"] for entry in state["epoch"].values() if not entry["values"]]
    return [*state["evaluated"], *([] if in_epoch else trained)]


def load_logged_state(trainer: Trainer, state: Mapping[str, Any], in_epoch: bool) -> None:
    """Go on with metrics that :func:`logged_state` returned.

    Args:
        trainer: about to train.
        state: of the run that is resumed.
        in_epoch: whether its epoch goes on; else a new one begins.

    Raises:
        PrivateNameError: Lightning keeps them elsewhere by now.
    """
    connector = required(trainer, "_logger_connector", _LOGGED_PURPOSE)
    for name in _NEWEST:
        required(connector, name, _LOGGED_PURPOSE).update(state["newest"][name])
    if not in_epoch:
        return
    results = required(trainer.fit_loop.epoch_loop, "_results", _LOGGED_PURPOSE)
    for key, entry in state["epoch"].items():
        results[key] = (_number if entry["values"] else _object)(trainer, entry)
    # The next batch is not the first one of its epoch, after which Lightning would begin to count anew.
    required(connector, "_first_loop_iter", _LOGGED_PURPOSE)
    connector._first_loop_iter = True
    connector._current_fx = state["hook"]


def metric_states(module: LightningModule) -> dict[str, Any]:
    """Name of a metric -> how often it was updated, its states (tensors, or lists of them), and what it keeps beside.

    Of a ``MetricTracker``: how many metrics it has made.
    """
    made = {name: {"made": tracker.n_steps} for name, tracker in _trackers_of(module).items()}
    return made | {
        name: {
            "updates": metric.update_count,
            "states": map_tensors(lambda t: t.detach().cpu(), metric.metric_state),
            "beside": map_tensors(lambda t: t.detach().cpu(), _beside(metric)),
        }
        for name, metric in _metrics_of(module).items()
    }


def load_metric_states(module: LightningModule, states: Mapping[str, Any]) -> None:
    """Go on with metrics that :func:`metric_states` described; others are left as they are."""
    for name, tracker in _trackers_of(module).items():
        if name in states:
            _make(tracker, states[name]["made"])
    for name, metric in _metrics_of(module).items():
        saved = states.get(name)
        if saved is None or saved["states"].keys() != metric.metric_state.keys():
            continue
        for attribute, value in {**saved["states"], **saved.get("beside", {})}.items():
            setattr(metric, attribute, map_tensors(lambda tensor: tensor.to(metric.device, copy=True), value))  # noqa: B023
        required(metric, "_update_count", _METRICS_PURPOSE)
        metric._update_count = saved["updates"]
        metric._computed = None


def _make(tracker: MetricTracker, count: int) -> None:
    """Let a tracker have as many metrics as it had made."""
    while tracker.n_steps < count:
        tracker.increment()
    while tracker.n_steps > count:
        del tracker[-1]


def _beside(metric: Metric) -> dict[str, Any]:
    names = [name for kind, names in _BESIDE_STATES.items() if isinstance(metric, kind) for name in names]
    return {name: required(metric, name, _METRICS_PURPOSE) for name in names}


def _metrics_of(module: LightningModule) -> dict[str, Metric]:
    return {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}


def _trackers_of(module: LightningModule) -> dict[str, MetricTracker]:
    return {name: part for name, part in module.named_modules() if isinstance(part, MetricTracker)}


def _is_kept(metric: Any) -> bool:
    """Whether a metric has values in this epoch: numbers that were logged, or an object of the module that was."""
    return _is_object(metric) or (metric.is_tensor and not metric.has_reset)


def _is_object(metric: Any) -> bool:
    return not metric.is_tensor and required(metric.meta, "metric_attribute", _LOGGED_PURPOSE) is not None


def _objects(results: Mapping[str, Any]) -> list[str]:
    return [metric.meta.metric_attribute for metric in results.values() if _is_object(metric)]


def _entry(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    kept = _VALUES if metric.is_tensor else ()  # those of an object are kept with it
    values: dict[str, Tensor] = {name: getattr(metric, name) for name in kept if hasattr(metric, name)}
    return {
        "meta": {name: required(meta, name, _LOGGED_PURPOSE) for name in _FIELDS},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": {name: required(meta.sync, name, _LOGGED_PURPOSE) for name in _SYNC},
        "values": values,
        "step": required(metric, "_forward_cache", _LOGGED_PURPOSE),
        "updates": metric.update_count,
    }


def _number(trainer: Trainer, entry: Mapping[str, Any]) -> Any:
    metric = _metric(trainer, entry, is_tensor=True)
    for name, value in entry["values"].items():
        setattr(metric, name, value.clone())
    return metric


def _object(trainer: Trainer, entry: Mapping[str, Any]) -> Any:
    metric = _metric(trainer, entry, is_tensor=False)
    metric.value = operator.attrgetter(entry["meta"]["metric_attribute"])(trainer.lightning_module)
    return metric


def _metric(trainer: Trainer, entry: Mapping[str, Any], is_tensor: bool) -> Any:
    meta = required(lightnings, "_Metadata", _LOGGED_PURPOSE)(**entry["meta"], reduce_fx=entry["reduce_fx"])
    sync = {argument: entry["sync"][name] for name, argument in _SYNC.items()}
    # As self.log makes it: metrics of one name with different options are refused.
    meta.sync = required(lightnings, "_Sync", _LOGGED_PURPOSE)(fn=trainer.strategy.reduce, **sync)
    metric = required(lightnings, "_ResultMetric", _LOGGED_PURPOSE)(meta, is_tensor)
    metric._forward_cache = entry["step"]
    required(metric, "_update_count", _LOGGED_PURPOSE)
    metric._update_count = entry["updates"]
    return metric
