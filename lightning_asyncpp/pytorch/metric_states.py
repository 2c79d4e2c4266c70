"""The torchmetrics objects of a module in the middle of an epoch, which their own ``state_dict`` leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from lightning_asyncpp.pipeline.batches.tree import map_tensors
from lightning_asyncpp.private_names import required

_PURPOSE = "go on with a torchmetrics object after a resume"
_BESIDE_STATES: dict[type[nn.Module], tuple[str, ...]] = {
    MinMaxMetric: ("min_val", "max_val"),
    Running: ("_num_vals_seen",),
}
"""What wrappers of torchmetrics keep in attributes that are no states."""


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
        required(metric, "_update_count", _PURPOSE)
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
    return {name: required(metric, name, _PURPOSE) for name in names}


def _metrics_of(module: LightningModule) -> dict[str, Metric]:
    return {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}


def _trackers_of(module: LightningModule) -> dict[str, MetricTracker]:
    return {name: part for name, part in module.named_modules() if isinstance(part, MetricTracker)}
