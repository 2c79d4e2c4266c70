"""What the entries of a checkpoint are: weights, older weights, optimizer, buffers of corrections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_asyncpp.pipeline.checkpoint.optimizer_state import BY_PARAMETER
from lightning_asyncpp.pipeline.checkpoint.origin import DELAYED_GRADIENT, PIPELINE, TRAINER, WEIGHTS, Origin, origin_of
from lightning_asyncpp.pipeline.checkpoint.state import MASTERS, OLDER
from lightning_asyncpp.storage.errors import StorageError

_STATE = ("state", "groups", "group_of", "param_groups")  # of an optimizer; what else it has is a correction's


class Contents(NamedTuple):
    """A checkpoint, taken apart.

    Attributes:
        origin: who wrote it.
        models: entry -> ``state_dict`` of a model; the entry is empty for weights alone.
        strategy: what the strategy kept.
        parts: part -> its tensors, nested.
    """

    origin: Origin
    models: dict[str, Mapping[str, Any]]
    strategy: Mapping[str, Any]
    parts: dict[str, Any]


def contents_of(content: Any) -> Contents:
    """Take a checkpoint apart.

    Args:
        content: all that it holds.
    """
    origin = origin_of(content)
    entries = content if isinstance(content, Mapping) else {}
    strategy = entries.get(origin.strategy, {}) if origin.strategy else {}
    models = _models(origin, entries)
    states = [state for value in entries.values() for state in _optimizers(value)]
    parts = {
        "weights": models,
        "older weights": strategy.get(OLDER, {}),
        "masters": strategy.get(MASTERS, {}),
        "optimizer": [{key: state[key] for key in _STATE if key in state} for state in states],
        "correction buffers": [{k: value for k, value in state.items() if k not in _STATE} for state in states],
    }
    known = {_identity(tensor) for part in parts.values() for tensor in tensors_of(part)}
    other = [tensor for tensor in tensors_of(content) if _identity(tensor) not in known]
    return Contents(origin, models, strategy, {**parts, "else": other})


def model_of(contents: Contents, entry: str | None) -> dict[str, Tensor]:
    """The model's ``state_dict``; what a LightningModule puts before all names, ``model.``, is left out.

    Args:
        contents: of a checkpoint.
        entry: which, if there are several.

    Raises:
        StorageError: there is none, or several.
    """
    models = contents.models
    if entry is not None:
        models = {name: model for name, model in models.items() if name == entry}
    if len(models) != 1:
        if not contents.models:
            raise StorageError("the checkpoint has no model: nothing in it is a state_dict")
        found = ", ".join(contents.models)
        asked = "" if entry is None else f" called {entry!r}"
        raise StorageError(f"the checkpoint has not one model{asked}; its models are: {found}; name one: --entry NAME")
    (state,) = models.values()
    weights = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    if contents.origin.writer == TRAINER and all(key.startswith("model.") for key in weights):
        weights = {key.removeprefix("model."): value for key, value in weights.items()}
    return weights


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """All tensors of nested dictionaries, lists and tuples; one that has several names once."""
    seen: set[Any] = set()

    def walk(node: Any) -> Iterator[Tensor]:
        if isinstance(node, Tensor):
            if (key := _identity(node)) not in seen:
                seen.add(key)
                yield node
        elif isinstance(node, Mapping):
            for child in node.values():
                yield from walk(child)
        elif isinstance(node, (list, tuple)):
            for child in node:
                yield from walk(child)

    yield from walk(tree)


def _identity(tensor: Tensor) -> Any:
    where = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return where if tensor.numel() else id(tensor)


def _models(origin: Origin, entries: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    if origin.writer == WEIGHTS:
        return {"": entries}
    if origin.writer == TRAINER:
        state = entries.get("state_dict")
        return {"state_dict": state} if isinstance(state, Mapping) else {}
    return {
        str(name): value
        for name, value in entries.items()
        if name not in (PIPELINE, DELAYED_GRADIENT) and isinstance(value, Mapping) and _is_model(value)
    }


def _is_model(state: Mapping[str, Any]) -> bool:
    return not list(_optimizers(state)) and any(isinstance(value, Tensor) for value in state.values())


def _optimizers(value: Any) -> Iterator[Mapping[str, Any]]:
    """The optimizer states in an entry: itself, or those in a list."""
    for state in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(state, Mapping) and "state" in state and ("param_groups" in state or BY_PARAMETER in state):
            yield state
