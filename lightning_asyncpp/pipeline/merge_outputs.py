"""Joining what a step returned for the micro-batches of a batch into what it would have returned for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def merge_outputs(results: Sequence[Any], weights: Sequence[float]) -> Any:
    """Concatenate tensors along their first dimension; average tensors of one element with the weights.

    Dictionaries, tuples and lists are merged entry by entry. Anything else comes as the list of the micro-batches'
    results.
    """
    if not results:
        return None
    first = results[0]
    if all(isinstance(result, Tensor) for result in results):
        return _merge_tensors(results, weights)
    if isinstance(first, Mapping):
        return {key: merge_outputs([result[key] for result in results], weights) for key in first}
    if isinstance(first, (tuple, list)):
        merged = [merge_outputs([result[i] for result in results], weights) for i in range(len(first))]
        return tuple(merged) if isinstance(first, tuple) else merged
    return None if all(result is None for result in results) else list(results)


def _merge_tensors(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    if tensors[0].ndim:
        return torch.cat(list(tensors))
    total = sum(weights)
    return torch.stack([tensor.detach() * (weight / total) for tensor, weight in zip(tensors, weights)]).sum()
