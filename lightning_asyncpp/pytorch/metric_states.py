"""The torchmetrics objects of a module in the middle of an epoch, which their own ``state_dict`` leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_asyncpp.pipeline.tree import map_tensors
from lightning_asyncpp.private_names import required

_PURPOSE = "go on with a torchmetrics object after a resume"


def metric_states(module: LightningModule) -> dict[str, Any]:
    """Name of a metric -> how often it was updated, and its states: tensors, or lists of them."""
    return {
        name: {"updates": metric.update_count, "states": map_tensors(lambda t: t.detach().cpu(), metric.metric_state)}
        for name, metric in _metrics_of(module).items()
    }


def load_metric_states(module: LightningModule, states: Mapping[str, Any]) -> None:
    """Go on with metrics that :func:`metric_states` described; others are left as they are."""
    for name, metric in _metrics_of(module).items():
        saved = states.get(name)
        if saved is None or saved["states"].keys() != metric.metric_state.keys():
            continue
        for state, value in saved["states"].items():
            setattr(metric, state, map_tensors(lambda tensor: tensor.to(metric.device, copy=True), value))  # noqa: B023
        required(metric, "_update_count", _PURPOSE)
        metric._update_count = saved["updates"]
        metric._computed = None


def _metrics_of(module: LightningModule) -> dict[str, Metric]:
    return {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
