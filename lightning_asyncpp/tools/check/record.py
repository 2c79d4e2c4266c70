"""Records of trainings, the first difference between two records, and the report of a check."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

_PAGE = "docs/concepts/contract.md"
_SENTENCES = {
    3: "By arguments", 4: "Once, in order", 5: "Weights in layers", 6: "What a step keeps", 7: "Random numbers",
    8: "A mean over samples", 9: "Samples first", 11: "Each parameter by itself", 12: "Of its own batch",
    13: "The optimizer changes weights", 14: "One update behind", 15: "After its own update",
}  # fmt: skip
# Comparison -> kind of quantity -> numbers of sentences that may explain a difference; "" is any kind not listed.
_WHY: dict[str, dict[str, tuple[int, ...]]] = {
    "pieces": {"loss": (3, 6, 7), "gradient": (5, 3, 11, 13, 14), "gradient used": (6, 11, 7), "": (11, 13, 6)},
    "delayed": {"gradient used": (12, 14), "weights": (13, 12), "value at the end": (15, 14), "": (14, 4, 12)},
    "whole": {"": (8, 9)},
}
EQUAL = "equal to the last bit"
EQUAL_BUT_FOR_ORDER = "equal up to the order of sums, because several stages use the same value"
_MEANINGS = {
    "pieces": "cutting the model: pipeline without delay against whole model, same microbatches",
    "delayed": "the delay: pipeline against whole model with same delay",
    "whole": "cutting batches: whole batches against microbatches",
}


@dataclass(frozen=True)
class Difference:
    """First quantity that differs between two trainings."""

    update: int
    kind: str  # one of KINDS
    name: str  # name of a parameter, of another tensor or of a batch
    values: tuple[Any, Any]  # expected and found; norms for tensors
    others: int  # number of further differences of this kind in this update
    comparison: str = ""
    stage: int | None = None
    hint: str = ""  # a change of the module that removes the difference
    attributes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # the module's attributes that differ

    def __str__(self) -> str:
        place = f" of {self.name}" if self.name else ""
        place += f" (stage {self.stage})" if self.stage is not None else ""
        more = f"; {self.others} more differ" if self.others else ""
        lines = [f"update {self.update}, {self.kind}{place}: {_both(self.kind, self.values)}{more}"]
        for name, values in self.attributes.items():
            lines.append(f"self.{name} of the module differs, too: {_both('', values)}")
        lines += [self.hint] if self.hint else []
        return "\n    ".join([*lines, f"May be explained by the contract ({_PAGE}), sentence {self._sentences()}."])

    def _sentences(self) -> str:
        of_comparison = _WHY[self.comparison]
        numbers = of_comparison.get(self.kind, of_comparison[""])
        return " or ".join(f"{number} ({_SENTENCES[number]})" for number in numbers)


@dataclass(frozen=True)
class CheckReport:
    """Report of ``check_model``: a comparison of a module's training in a pipeline and in one process."""

    stages: Sequence[Sequence[str]]  # names of each stage's layers
    microbatches: int
    losses: Sequence[float]  # losses of the batches, in order
    comparisons: Mapping[str, Difference | str]  # by "pieces", "delayed", "whole"; a text if nothing differs
    accumulated: int = 1  # number of batches per update

    @property
    def differences(self) -> list[Difference]:
        """Differences of all comparisons."""
        return [found for found in self.comparisons.values() if isinstance(found, Difference)]

    @property
    def ok(self) -> bool:
        """Whether there is no difference and all losses are finite."""
        return not self.differences and all(map(math.isfinite, self.losses))

    def __str__(self) -> str:
        lines = [f"stage {number}: {', '.join(names)}" for number, names in enumerate(self.stages)]
        of = f" ({self.accumulated} per update)" if self.accumulated != 1 else ""
        cut = f"{len(self.losses)} batches{of} in {self.microbatches} microbatches each"
        lines.append(f"{cut}, loss {self.losses[0]:.6g} -> {self.losses[-1]:.6g}")
        for name, found in self.comparisons.items():
            lines.append(f"{name} ({_MEANINGS[name]}):\n    {'DIFFERS in ' * isinstance(found, Difference)}{found}")
        wrong = [f"{difference.comparison} differs" for difference in self.differences] or ["a loss is not finite"]
        lines.append("OK: nothing differs" if self.ok else f"NOT OK: {', '.join(wrong)}")
        return "\n".join(lines)


def _both(kind: str, values: tuple[Any, Any]) -> str:
    expected, found = (f"{value:.9g}" if isinstance(value, float) else str(value) for value in values)
    norm = "a norm of " if kind in ("gradient", "gradient used", "weights", "value at the end") else ""
    if expected == found:
        return f"{norm}{expected} on both sides, but elements differ"
    return f"{norm}{expected} is right, {found} was found"


# Kinds of quantities, in the order in which they are compared.
KINDS = (
    "number of updates", "options of the group", "loss", "gradient", "gradient used", "weights", "value at the end",
)  # fmt: skip
UPDATES, OPTIONS, LOSS, GRADIENT, USED, WEIGHTS, END = KINDS
Rounding = Mapping[str, float]  # kind -> relative tolerance of a number or norm; other kinds are not compared
# Tolerances if terms are summed in another order. Weights may differ more than gradients, because Adam divides by the
# size of the gradient: the rounding error of a small gradient becomes a step of full size.
OF_ORDER: Rounding = {kind: 1e-2 if kind in (WEIGHTS, END) else 1e-3 for kind in KINDS}
_PLAIN = (bool, int, float, str, tuple, Tensor)
Key = tuple[int, str, str]  # update; kind; name of a parameter, of another tensor or of a batch


class Value(NamedTuple):
    """Digest of a value, by which values are compared, and what to show: a tensor's 2-norm, or the value itself."""

    digest: Any
    shown: Any


class Record(L.Callback):
    """Callback that records a training, including the tensors that other ``callbacks`` keep.

    It must be the trainer's first callback.
    """

    def __init__(self, callbacks: Sequence[L.Callback] = ()) -> None:
        self.seen: dict[Key, Value] = {}
        self.attributes: dict[tuple[int, str], dict[str, Any]] = {}  # the module's, by update and parameter or "batch"
        self._callbacks = callbacks
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
        update = batch_idx // trainer.accumulate_grad_batches
        self._see(update, LOSS, f"batch {batch_idx}", outputs["loss"])
        self.attributes[update, "batch"] = _plain(vars(pl_module))

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Record gradients, before other callbacks and hooks of the module change them."""
        for name, parameter, _ in self._stepped(optimizer):
            self._see(self._updates[name], GRADIENT, name, parameter.grad)
            self.attributes[self._updates[name], name] = _plain(vars(pl_module))

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._names = {}
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
            self._see(update, USED, name, parameter.grad)
            self._see(update, WEIGHTS, name, parameter)
            for option, value in _plain(group).items():
                self._see(update, OPTIONS, f"{name} {option}", value)

    def _stepped(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield name, parameter and group of each parameter in an optimizer, which in a pipeline is that of a stage."""
        for group in optimizer.param_groups:
            yield from ((self._names.get(p, ""), p, group) for p in group["params"] if p.requires_grad)

    def _see(self, update: int, kind: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.seen[update, kind, name] = _value_of(value)
        elif value is not None:
            self.seen[update, kind, name] = Value(repr(value), value)

    def numbers(self, kind: str) -> list[float]:
        """Return the recorded numbers of a kind; for tensors, their norms."""
        return [value.shown for key, value in self.seen.items() if key[1] == kind and isinstance(value.shown, float)]


def _kept_by(owner: object) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in an object's attributes with its path; containers and modules in attributes are searched.

    The parameters, buffers and submodules of a module are left out.
    """
    for name, value in vars(owner).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            held = value.state_dict() if isinstance(value, nn.Module) else value
            yield from _tensors_in(held, f"{type(owner).__name__}.{name}")


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in containers, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors_in(entry, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from _tensors_in(entry, f"{path}[{number}]")


def first_difference(expected: Record, found: Record, rounding: Rounding | None = None) -> Difference | None:
    """Return the first quantity that differs between two trainings; None if there is none.

    Args:
        expected: record of one training.
        found: record of the other training.
        rounding: tolerances; default: every difference counts. Small norms have an absolute tolerance, too, in
            proportion to the largest norm of their kind.
    """
    kinds = dict.fromkeys(KINDS, 0.0) if rounding is None else rounding
    keys = [key for key in dict.fromkeys([*expected.seen, *found.seen]) if key[1] in kinds]
    keys.sort(key=lambda key: (key[1] == END, key[0], KINDS.index(key[1])))
    sizes = {kind: max(filter(math.isfinite, expected.numbers(kind)), default=0.0) for kind in kinds}
    pairs = {key: (expected.seen.get(key), found.seen.get(key)) for key in keys}
    apart = [key for key, pair in pairs.items() if _differ(*pair, kinds[key[1]], 0.01 * sizes[key[1]])]
    if not apart:
        return None
    update, kind, name = apart[0]
    others = sum(key[:2] == (update, kind) for key in apart) - 1
    a, b = (value.shown if value else None for value in pairs[apart[0]])
    return Difference(update, kind, name, (a, b), others, attributes=_attributes_apart(expected, found, update, name))


def _attributes_apart(expected: Record, found: Record, update: int, name: str) -> dict[str, tuple[Any, Any]]:
    """Return the module's recorded attributes that differ at an update; one of them may be the cause."""
    a, b = (record.attributes.get((update, name.partition(" ")[0]), {}) for record in (expected, found))
    names = a.keys() | b.keys() if a and b else ()
    return {key: (a.get(key), b.get(key)) for key in sorted(names) if repr(a.get(key)) != repr(b.get(key))}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, _PLAIN)}


def _differ(a: Value | None, b: Value | None, rounding: float, scale: float) -> bool:
    if a is None or b is None:
        return any(value is not None and value.shown for value in (a, b))  # a missing gradient counts as 0
    if not (rounding and isinstance(a.shown, float) and isinstance(b.shown, float)):
        return bool(a.digest != b.digest)
    is_close = math.isclose(a.shown, b.shown, rel_tol=rounding, abs_tol=rounding * scale)
    return not is_close and not (math.isnan(a.shown) and math.isnan(b.shown))


def _value_of(tensor: Tensor) -> Value:
    tensor = tensor.detach()
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).cpu().contiguous()
    norm = float(torch.linalg.vector_norm(tensor.double()))
    as_bytes = (tensor + 0 if tensor.is_floating_point() else tensor).reshape(-1).view(torch.uint8)  # -0.0 becomes 0.0
    return Value(hashlib.blake2b(as_bytes.numpy().data).digest(), norm)
