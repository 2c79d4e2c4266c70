"""Tells the user once that micro-batches have unequal numbers of targets, and that nobody weighs them by these.

A step that returns the mean over targets (cross entropy leaves out those of -100) then trains another mean than that
over the whole batch: every target of a short sample counts for more than one of a long sample.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.batches.micro_batch import number_of_samples
from lightning_asyncpp.core.batches.shifted_labels import model_that_shifts
from lightning_asyncpp.core.batches.tree import is_named_tuple
from lightning_asyncpp.core.batches.user_hooks import UserHooks

IGNORED = -100
"""``ignore_index`` of torch's cross entropy, and of ``transformers``."""
_BATCHES = 100
TARGET_NAMES = ("label", "target")
"""Parts of the names that batches give to targets."""
_MOST_SHOWN = 8


class UnequalTargets:
    """Looks at the micro-batches of the first batches, until there is something to tell.

    Nothing is told where the user weighs micro-batches, or returns sums.

    Args:
        hooks: the user's side.
        listens: whether this rank tells anything.
        network: what the step calls, whose loss may shift its labels; None if it is no single module.
    """

    def __init__(self, hooks: UserHooks, listens: bool = True, network: nn.Module | None = None) -> None:
        self._network = network
        may_be_wrong = hooks.weighs_samples and hooks.loss_reduction == "mean"
        self._remaining = _BATCHES if listens and may_be_wrong else 0

    def stop(self) -> None:
        """Look at nothing more."""
        self._remaining = 0

    def look(self, micro_batches: Sequence[Any]) -> None:
        """Look at the micro-batches of a training batch; what is on a GPU is not read.

        Args:
            micro_batches: where that is known, as they were on the host; ``None`` for an empty slot.
        """
        if not self._remaining:
            return
        self._remaining -= 1
        filled = [micro_batch for micro_batch in micro_batches if micro_batch is not None]
        for path, targets in _targets_of(filled):
            counts = [_count(tensor) for tensor in targets]
            samples = [number_of_samples(micro_batch) for micro_batch in filled]
            # A causal language model shifts its labels, so that the first one of a row never counts; others do not.
            shifted = [_count(tensor[..., 1:]) if tensor.ndim > 1 else _count(tensor) for tensor in targets]
            if _differ(counts, samples) and _differ(shifted, samples):
                self.stop()
                shifts = model_that_shifts(self._network)
                text = unequal_targets_text(path, counts, targets[0].ndim > 1, shifts)
                warnings.warn(text, stacklevel=2)
                return


def unequal_targets_text(path: str, counts: Sequence[int], in_rows: bool, shifts: str | None = None) -> str:
    """What to tell the user, once.

    Args:
        path: behind ``micro_batch``, where the targets are: ``['labels']``.
        counts: of every micro-batch, how many of them are not -100.
        in_rows: whether a sample has several, which a loss may shift.
        shifts: name of the model whose own loss shifts its labels; None where nobody knows.
    """
    targets = f"micro_batch{path}"
    shown = ", ".join([*map(str, counts[:_MOST_SHOWN]), *(["..."] if len(counts) > _MOST_SHOWN else [])])
    return (
        f"the micro-batches of a batch have unequal numbers of targets ({targets}, entries that are not {IGNORED}:"
        f" {shown}), and the module has no micro_batch_weight: they count by their samples. If the step returns a mean"
        " over these targets, that is another loss than the mean over the whole batch, and trains to something else."
        f" Define on the module (in Fabric, give the strategy such a function)"
        f"{_what_to_paste(targets, in_rows, shifts)}"
        f"If samples count equally in your loss, return float(len({targets})) there. This is said once"
    )


def _what_to_paste(targets: str, in_rows: bool, shifts: str | None) -> str:
    """The lines, or both alternatives where it is not known whether the loss shifts."""
    as_they_are, shifted = _lines(targets), _lines(f"{targets}[..., 1:]")
    if not in_rows:
        return f":\n\n{as_they_are}\n"
    if shifts:
        return (
            f":\n\n{shifted}\n{shifts} shifts the labels by one in its own loss, so that the first one of a row never"
            " counts. If the step computes another loss, over the labels as they are, leave [..., 1:] out.\n"
        )
    return (
        " one of these two. check_model says which is right.\n\n"
        f"(a) The loss takes the labels as they are:\n\n{as_they_are}\n"
        "(b) The model's loss shifts the labels by one, as those of causal language models of transformers do, so that"
        f" the first one of a row never counts:\n\n{shifted}\n"
    )


def _lines(targets: str) -> str:
    return (
        "    def micro_batch_weight(self, micro_batch):\n"
        f"        return float(({targets} != {IGNORED}).sum())\n"
    )  # fmt: skip


def _targets_of(micro_batches: Sequence[Any]) -> Iterator[tuple[str, list[Tensor]]]:
    """What looks like targets of which some are left out, with its place, of every micro-batch."""
    if len(micro_batches) < 2:
        return
    entries = [dict(_entries(micro_batch)) for micro_batch in micro_batches]
    for path, name in entries[0]:
        found = [values.get((path, name)) for values in entries]
        tensors = [value for value in found if isinstance(value, Tensor) and value.is_cpu and value.ndim]
        if len(tensors) == len(entries) and any(_has_ignored(tensor, name) for tensor in tensors):
            yield path, tensors


def _entries(batch: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """(place, name) and value of what a batch holds; without a name in tuples and lists."""
    if isinstance(batch, Mapping):
        yield from (((f"[{key!r}]", str(key)), value) for key, value in batch.items())
    elif is_named_tuple(batch):
        yield from (((f".{name}", name), getattr(batch, name)) for name in batch._fields)
    elif isinstance(batch, (tuple, list)):
        yield from (((f"[{place}]", ""), value) for place, value in enumerate(batch))
    elif is_dataclass(batch):
        yield from (((f".{field.name}", field.name), getattr(batch, field.name)) for field in fields(batch))


def _has_ignored(tensor: Tensor, name: str) -> bool:
    """Whether it is made of classes and -100; by its dtype alone, which is cross entropy's, where it has no name."""
    named = any(part in name.lower() for part in TARGET_NAMES)
    if (name and not named) or tensor.dtype != torch.int64 or not tensor.numel():
        return False
    return int(tensor.min()) == IGNORED  # lower ones are no classes


def _count(tensor: Tensor) -> int:
    return int((tensor != IGNORED).sum())


def _differ(counts: Sequence[int], samples: Sequence[int]) -> bool:
    """Whether numbers of targets weigh micro-batches otherwise than numbers of samples do."""
    both = list(zip(counts, samples))
    return any(count * n != other * m for (count, m), (other, n) in itertools.pairwise(both))
