"""What happens in the first updates of a training, and where two trainings differ."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.tools.check.report import Difference

# In the order in which they are compared.
_KINDS = ("options of the group", "loss", "gradient used", "weights", "value at the end")
OPTIONS, LOSS, GRADIENT, WEIGHTS, END = _KINDS
# What is rounding: three quarters of the digits of a dtype for a loss, half of them for a gradient, where terms cancel.
_DIGITS = {LOSS: 0.75, GRADIENT: 0.5}
_PLAIN = (bool, int, float, str, tuple, Tensor)
Key = tuple[int, str, str]  # update, or batch; kind; name of a parameter or buffer


class Value(NamedTuple):
    """A value, short enough to be kept: equal digests are equal values, a tensor is shown as its 2-norm."""

    digest: Any
    shown: Any
    tensor: Tensor | None = None


class Record(L.Callback):
    """Records a training, or, with ``keep``, only losses and gradients, but as they are."""

    def __init__(self, keep: bool = False) -> None:
        self.seen: dict[Key, Value] = {}
        self._keep = keep
        self._updates: Counter[str] = Counter()
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
        self._see(batch_idx, LOSS, "", outputs["loss"])

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._keep:
            for name, tensor in [*pl_module.named_parameters(), *pl_module.named_buffers()]:
                self._see(trainer.global_step, END, name, tensor)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            options = {k: v for k, v in group.items() if isinstance(v, _PLAIN)}
            for parameter in group["params"]:
                name = self._names.get(parameter, "")
                update = self._updates[name]
                self._updates[name] += 1
                self._see(update, GRADIENT, name, parameter.grad)
                if not self._keep:
                    for option, value in options.items():
                        self._see(update, OPTIONS, f"{name} {option}", value)
                    self._see(update, WEIGHTS, name, parameter)

    def _see(self, update: int, kind: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.seen[update, kind, name] = _value_of(value, self._keep)
        elif value is not None:
            self.seen[update, kind, name] = Value(repr(value), value)

    @property
    def losses(self) -> list[float]:
        """Losses of all batches."""
        return [value.shown for key, value in self.seen.items() if key[1] == LOSS]


def first_difference(expected: Record, found: Record, eps: float = 0.0) -> Difference | None:
    """The first quantity in which two trainings differ: to the last bit, or, of an ``eps``, by more than rounding."""
    differ = _beyond_rounding(expected, eps) if eps else _to_the_last_bit
    keys = dict.fromkeys([*expected.seen, *found.seen])
    in_order = sorted(keys, key=lambda key: (key[1] == END, key[0], _KINDS.index(key[1])))
    pairs = [(key, expected.seen.get(key), found.seen.get(key)) for key in in_order]
    apart = [(key, a, b) for key, a, b in pairs if differ(key[1], a, b)]
    if not apart:
        return None
    (update, kind, name), a, b = apart[0]
    others = sum(key[:2] == (update, kind) for key, *_ in apart) - 1
    return Difference(update, kind, name, (a.shown if a else None, b.shown if b else None), others)


def _to_the_last_bit(kind: str, a: Value | None, b: Value | None) -> bool:
    if a is None or b is None:
        return any(value is not None and value.shown for value in (a, b))  # no gradient is one of 0
    return bool(a.digest != b.digest)


def _beyond_rounding(expected: Record, eps: float) -> Callable[[str, Value | None, Value | None], bool]:
    """A small gradient beside large ones is compared on their scale."""
    sizes = [float(v.tensor.abs().max()) for k, v in expected.seen.items() if k[1] == GRADIENT and v.tensor is not None]
    floor = {GRADIENT: 0.01 * max(sizes, default=0.0), LOSS: 0.0}

    def differ(kind: str, a: Value | None, b: Value | None) -> bool:
        if a is None or b is None or a.tensor is None or b.tensor is None:
            return False
        x, y = a.tensor.double(), b.tensor.double()
        scale = max(float(x.abs().max()), float(y.abs().max()), floor[kind])
        is_near = bool(((x - y).abs().max() <= scale * eps ** _DIGITS[kind]).item())
        return not is_near and not (math.isnan(a.shown) and math.isnan(b.shown))

    return differ


def _value_of(tensor: Tensor, keep: bool) -> Value:
    tensor = tensor.detach()
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).cpu().contiguous()
    norm = float(torch.linalg.vector_norm(tensor.double()))
    as_bytes = (tensor + 0 if tensor.is_floating_point() else tensor).reshape(-1).view(torch.uint8)  # -0.0 becomes 0.0
    return Value(
        hashlib.blake2b(as_bytes.numpy().data).digest(), norm, tensor.clone() if keep and tensor.numel() else None
    )
