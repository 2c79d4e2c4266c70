"""What happens in the first updates of a training, and where two trainings differ."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path
from typing_extensions import override

from lightning_asyncpp.tools.check.report import Difference

# In the order in which they are compared.
KINDS = (
    "number of updates", "options of the group", "loss", "gradient", "gradient used", "weights", "value at the end",
)  # fmt: skip
UPDATES, OPTIONS, LOSS, GRADIENT, USED, WEIGHTS, END = KINDS
# What is rounding: three quarters of the digits of a dtype for a loss, half of them for a gradient, where terms cancel.
_DIGITS = {LOSS: 0.75, GRADIENT: 0.5}
_PLAIN = (bool, int, float, str, tuple, Tensor)
Key = tuple[int, str, str]  # update, or batch; kind; name of a parameter or of another tensor


class Value(NamedTuple):
    """A value, short enough to be kept: equal digests are equal values, a tensor is shown as its 2-norm."""

    digest: Any
    shown: Any
    tensor: Tensor | None = None


class Record(L.Callback):
    """Records a training with other ``callbacks``, or, with ``keep``, only losses and gradients, but as they are."""

    def __init__(self, keep: bool = False, callbacks: Sequence[L.Callback] = ()) -> None:
        self.seen: dict[Key, Value] = {}
        self.attributes: dict[tuple[int, str], dict[str, Any]] = {}  # update, parameter -> the module's plain ones
        self._keep, self._callbacks = keep, callbacks
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
        self.attributes[batch_idx, ""] = _plain(vars(pl_module))

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """See gradients before anybody changes them: this is the first callback."""
        for name, parameter, _ in self._stepped(optimizer):
            if not self._keep or self._updates[name] < 2:  # what is kept takes memory
                self._see(self._updates[name], GRADIENT, name, parameter.grad)
            self.attributes[self._updates[name], name] = _plain(vars(pl_module))

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._names = {}
        if self._keep:
            return
        for name, count in self._updates.items():
            self._see(0, UPDATES, name, count)
        own = itertools.chain(pl_module.named_parameters(), pl_module.named_buffers())
        kept = itertools.chain.from_iterable(_kept_by(owner) for owner in (pl_module, *self._callbacks))
        for name, tensor in itertools.chain(own, kept):
            self._see(trainer.global_step, END, name, tensor)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for name, parameter, group in self._stepped(optimizer):
            update = self._updates[name]
            self._updates[name] += 1
            if not self._keep:
                self._see(update, USED, name, parameter.grad)
                self._see(update, WEIGHTS, name, parameter)
                for option, value in _plain(group).items():
                    self._see(update, OPTIONS, f"{name} {option}", value)

    def _stepped(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Name, parameter and group of what an optimizer steps now: in a pipeline, of a stage."""
        for group in optimizer.param_groups:
            yield from ((self._names.get(p, ""), p, group) for p in group["params"] if p.requires_grad)

    def _see(self, update: int, kind: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.seen[update, kind, name] = _value_of(value, self._keep)
        elif value is not None:
            self.seen[update, kind, name] = Value(repr(value), value)

    @property
    def losses(self) -> list[float]:
        """Losses of all batches."""
        return [value.shown for key, value in self.seen.items() if key[1] == LOSS]


def _kept_by(owner: object) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes that are neither parameters nor buffers, also within containers and other modules."""
    for name, value in vars(owner).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            leaves, _ = tree_flatten_with_path(value.state_dict() if isinstance(value, nn.Module) else value)
            found = [(f"{type(owner).__name__}.{name}{keystr(path)}", x) for path, x in leaves if isinstance(x, Tensor)]
            yield from found


def first_difference(expected: Record, found: Record, eps: float = 0.0, is_exact: bool = True) -> Difference | None:
    """The first quantity in which two trainings differ: to the last bit, or, of an ``eps``, by more than rounding.

    Unless they are to be exact, norms of what was trained may differ by what another order of sums does.
    """
    differ = _beyond_rounding(expected, eps) if eps else _to_the_last_bit if is_exact else _in_norms
    keys = dict.fromkeys([*expected.seen, *found.seen])
    in_order = sorted(keys, key=lambda key: (key[1] == END, key[0], KINDS.index(key[1])))
    pairs = [(key, expected.seen.get(key), found.seen.get(key)) for key in in_order]
    apart = [(key, a, b) for key, a, b in pairs if differ(key[1], a, b)]
    if not apart:
        return None
    (update, kind, name), a, b = apart[0]
    others = sum(key[:2] == (update, kind) for key, *_ in apart) - 1
    values = (a.shown if a else None, b.shown if b else None)
    return Difference(update, kind, name, values, others, attributes=_attributes_apart(expected, found, update, name))


def _attributes_apart(expected: Record, found: Record, update: int, name: str) -> dict[str, tuple[Any, Any]]:
    """Plain attributes of the module that differ then: what a step counts may, but one of them may be the cause."""
    a, b = (record.attributes.get((update, name.partition(" ")[0]), {}) for record in (expected, found))
    names = a.keys() | b.keys() if a and b else ()
    return {key: (a.get(key), b.get(key)) for key in sorted(names) if repr(a.get(key)) != repr(b.get(key))}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, _PLAIN)}


def _to_the_last_bit(kind: str, a: Value | None, b: Value | None) -> bool:
    if a is None or b is None:
        return any(value is not None and value.shown for value in (a, b))  # no gradient is one of 0
    return bool(a.digest != b.digest)


def _in_norms(kind: str, a: Value | None, b: Value | None) -> bool:
    if a is None or b is None or not (isinstance(a.shown, float) and isinstance(b.shown, float)):
        return _to_the_last_bit(kind, a, b)
    rounding = 1e-2 if kind in (WEIGHTS, END) else 1e-3  # Adam takes whole steps of rounding where a gradient is small
    return not math.isclose(a.shown, b.shown, rel_tol=rounding, abs_tol=1e-6) and not math.isnan(a.shown + b.shown)


def _beyond_rounding(expected: Record, eps: float) -> Callable[[str, Value | None, Value | None], bool]:
    """A small gradient beside large ones is compared on their scale."""
    sizes = [float(v.tensor.abs().max()) for k, v in expected.seen.items() if k[1] == GRADIENT and v.tensor is not None]
    floor = {GRADIENT: 0.01 * max(sizes, default=0.0), LOSS: 0.0}

    def differ(kind: str, a: Value | None, b: Value | None) -> bool:
        if a is None or b is None or a.tensor is None or b.tensor is None:
            return False
        scale = max(float(a.tensor.abs().max()), float(b.tensor.abs().max()), floor[kind])
        return not torch.allclose(a.tensor, b.tensor, rtol=0.0, atol=scale * eps ** _DIGITS[kind], equal_nan=True)

    return differ


def _value_of(tensor: Tensor, keep: bool) -> Value:
    tensor = tensor.detach()
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).cpu().contiguous()
    norm = float(torch.linalg.vector_norm(tensor.double()))
    as_bytes = (tensor + 0 if tensor.is_floating_point() else tensor).reshape(-1).view(torch.uint8)  # -0.0 becomes 0.0
    return Value(
        hashlib.blake2b(as_bytes.numpy().data).digest(), norm, tensor.clone() if keep and tensor.numel() else None
    )
