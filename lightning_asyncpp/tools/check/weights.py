"""What a loss may be a mean over: weights of microbatches, to be tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Getter = Callable[[Any], Any]


def possible_weights(batch: Any) -> Iterator[tuple[str, Callable[[Any], float]]]:
    """Expressions in ``micro_batch``, and the functions that they are: labels that count, then what masks leave."""
    found = [(text, get, tensor) for text, get, tensor in _tensors(batch) if not tensor.is_floating_point()]
    found.sort(key=lambda entry: not bool((entry[2] == -100).any()))
    for ignored in (-100, 0):  # a mask counts where it is not 0, as labels do that are padded with it
        for text, get, tensor in found:
            yield f"({text} != {ignored}).sum()", lambda m, g=get, i=ignored: float((g(m) != i).sum())
            if tensor.ndim > 1:  # labels that the loss shifts by one
                yield (
                    f"({text}[..., 1:] != {ignored}).sum()",
                    lambda m, g=get, i=ignored: float((g(m)[..., 1:] != i).sum()),
                )


def _tensors(value: Any, text: str = "micro_batch", get: Getter = lambda m: m) -> Iterator[tuple[str, Getter, Tensor]]:
    if isinstance(value, Tensor):
        yield text, get, value
        return
    entries = value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, (list, tuple)) else ())
    for key, entry in entries:
        yield from _tensors(entry, f"{text}[{key!r}]", lambda m, k=key: get(m)[k])
