"""What happens in the first updates of a training, and where two trainings differ."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

KINDS = ("options of the group", "loss", "gradient used", "weights", "value at the end")


class Key(NamedTuple):
    """What was seen.

    Attributes:
        update: number of the update, or of the batch.
        kind: one of ``KINDS``.
        name: of the parameter or buffer; empty for a loss.
    """

    update: int
    kind: str
    name: str = ""


class Value(NamedTuple):
    """A value, short enough to be kept.

    Attributes:
        digest: equal if the value is equal to the last bit.
        shown: a number, options, or the 2-norm of a tensor.
        tensor: itself, if it was to be kept.
    """

    digest: Any
    shown: Any
    tensor: Tensor | None = None

    @classmethod
    def of(cls, value: Any, keep: bool) -> Value:
        """Make it of a tensor, a number or options."""
        if not isinstance(value, Tensor):
            return cls(repr(value), value)
        value = value.detach()
        value = (value.to_dense() if value.is_sparse else value).cpu().contiguous()
        as_bytes = (value + 0 if value.is_floating_point() else value).flatten().view(torch.uint8)  # -0.0 becomes 0.0
        norm = float(torch.linalg.vector_norm(value, dtype=torch.float64)) if value.is_floating_point() else value.sum()
        return cls(hashlib.blake2b(as_bytes.numpy()).digest(), float(norm), value.clone() if keep else None)


class Record(L.Callback):
    """Records a training.

    Args:
        keep: keep losses and gradients themselves, to compare them up to rounding, and nothing else.

    Attributes:
        seen: what was seen, in order.
        updates: name of a parameter -> number of its updates.
    """

    def __init__(self, keep: bool = False) -> None:
        self.seen: dict[Key, Value] = {}
        self.updates: Counter[str] = Counter()
        self._keep = keep
        self._names: dict[Tensor, str] = {}

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._names = {p: name for name, p in pl_module.named_parameters()}
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._after_step)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._see(batch_idx, "loss", "", outputs["loss"])

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._keep:
            for name, tensor in [*pl_module.named_parameters(), *pl_module.named_buffers()]:
                self._see(trainer.global_step, "value at the end", name, tensor)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            options = {key: _number(value) for key, value in group.items() if key not in ("params", "param_names")}
            for parameter in group["params"]:
                name = self._names.get(parameter, "?")
                update = self.updates[name]
                self.updates[name] += 1
                self._see(update, "gradient used", name, parameter.grad)
                if not self._keep:
                    self._see(update, "options of the group", name, options)
                    self._see(update, "weights", name, parameter)

    def _see(self, update: int, kind: str, name: str, value: Any) -> None:
        if value is not None:
            self.seen[Key(update, kind, name)] = Value.of(value, self._keep)

    def losses(self) -> list[float]:
        """Losses of all batches."""
        return [value.shown for key, value in self.seen.items() if key.kind == "loss"]


class Apart(NamedTuple):
    """The first quantity in which two trainings differ.

    Attributes:
        keys: in which it is seen, in the order of the model; of the number of updates none.
        values: of the first key: in one process, and in the pipeline.
    """

    keys: tuple[Key, ...]
    values: tuple[Any, Any]


def first_difference(expected: Record, found: Record) -> Apart | None:
    """Where two trainings differ to the last bit, if they do."""
    for name in expected.updates | found.updates:
        if (numbers := (expected.updates[name], found.updates[name])) and numbers[0] != numbers[1]:
            return Apart((Key(min(numbers), "number of updates", name),), numbers)
    differ = [key for key in _in_order(expected, found) if not _equal(expected.seen.get(key), found.seen.get(key))]
    if not differ:
        return None
    first = differ[0]
    keys = tuple(key for key in differ if key[:2] == first[:2])
    return Apart(keys, _shown(expected.seen.get(first), found.seen.get(first)))


def largest_differences(expected: Record, found: Record) -> Iterator[tuple[Key, float, tuple[float, float]]]:
    """How far losses and gradients are apart as a share of their size, and both; the gradient's of the largest one's."""
    scales: Counter[tuple[int, str]] = Counter()
    for key, value in expected.seen.items():
        assert value.tensor is not None
        scales[key[:2]] = max(scales[key[:2]], float(value.tensor.abs().max()) if value.tensor.numel() else 0.0)  # type: ignore[assignment]
    for key in _in_order(expected, found):
        a, b = (record.seen[key].tensor if key in record.seen else None for record in (expected, found))
        if a is None or b is None or not a.numel() or (bool(a.isnan().any()) and bool(b.isnan().any())):
            continue
        scale = max(float(a.abs().max()), float(b.abs().max()), 0.01 * scales[key[:2]], 1e-30)
        apart = float((a.double() - b.double()).abs().max()) / scale
        yield key, apart if math.isfinite(apart) else math.inf, (expected.seen[key].shown, found.seen[key].shown)


def _in_order(*records: Record) -> list[Key]:
    keys = dict.fromkeys(key for record in records for key in record.seen)
    return sorted(keys, key=lambda key: (key.kind == KINDS[-1], key.update, KINDS.index(key.kind)))


def _equal(a: Value | None, b: Value | None) -> bool:
    if a is None or b is None:
        return not any(value is not None and value.shown for value in (a, b))  # no gradient is one of 0
    return bool(a.digest == b.digest)


def _shown(a: Value | None, b: Value | None) -> tuple[Any, Any]:
    if a is None or b is None or not isinstance(a.shown, Mapping):
        return tuple("nothing" if value is None else value.shown for value in (a, b))  # type: ignore[return-value]
    differing = [key for key in a.shown.keys() | b.shown.keys() if a.shown.get(key) != b.shown.get(key)]
    return tuple({key: value.shown.get(key) for key in differing} for value in (a, b))  # type: ignore[return-value]


def _number(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
