"""What the entries of a batch may count: weights of micro-batches that a check tries, the likeliest first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.core.batches.unequal_targets import IGNORED, TARGET_NAMES


class PossibleWeight(NamedTuple):
    """The expression, with ``micro_batch``, and the function that it is."""

    text: str
    weigh: Callable[[Any], float]


def possible_weights(batch: Any) -> list[PossibleWeight]:
    """Targets that are not -100 first, then masks, then other whole numbers; each as it is, and without the first.

    Several may agree with a batch: a mask counts what labels count, until labels leave out a prompt. So labels come
    before masks.

    Args:
        batch: a mapping, tuple or list of tensors; of anything else nothing is found.
    """
    listed = enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    entries = list(batch.items() if isinstance(batch, Mapping) else listed)
    counted = [(key, value) for key, value in entries if _is_whole_numbers(value)]
    labels = [weight for key, value in counted if _is_labels(key, value) for weight in _not_ignored(key, value)]
    masks = [weight for key, value in counted if _is_mask(value) for weight in _ones(key, value)]
    others = [weight for key, value in counted if not _is_labels(key, value) for weight in _not_ignored(key, value)]
    return [*labels, *masks, *others]


def _is_whole_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex() and value.ndim > 0


def _is_labels(key: Any, value: Tensor) -> bool:
    """By its name, or that it holds -100."""
    named = isinstance(key, str) and any(part in key.lower() for part in TARGET_NAMES)
    return named or (value.dtype != torch.bool and bool((value == IGNORED).any()))


def _is_mask(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _not_ignored(key: Any, value: Tensor) -> Iterator[PossibleWeight]:
    for first, text in _cuts(key, value):
        yield PossibleWeight(f"({text} != {IGNORED}).sum()", functools.partial(_targets, key, first))


def _ones(key: Any, value: Tensor) -> Iterator[PossibleWeight]:
    for first, text in _cuts(key, value):
        yield PossibleWeight(f"{text}.sum()", functools.partial(_total, key, first))


def _cuts(key: Any, value: Tensor) -> Iterator[tuple[int | None, str]]:
    """From where rows count, and how that is written; where a sample has several, also without the first."""
    text = f"micro_batch[{key!r}]"
    yield None, text
    if value.ndim > 1:
        yield 1, f"{text}[..., 1:]"


def _targets(key: Any, first: int | None, micro_batch: Any) -> float:
    return float((micro_batch[key][..., first:] != IGNORED).sum())


def _total(key: Any, first: int | None, micro_batch: Any) -> float:
    return float(micro_batch[key][..., first:].sum())
