"""Reading a GPT from the checkpoints that the Trainer and Fabric write, without running code that they hold."""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.saved import SavedGPT, WeightsError
from lightning_asyncpp.storage.files import StorageError
from lightning_asyncpp.storage.folders import load

MARK = "embedding.token.weight"  # what the state_dict of a GPT has and no other model
COMPILED = "_orig_mod."
_HYPER_PARAMETERS = "hyper_parameters"
_DATA_HYPER_PARAMETERS = "datamodule_hyper_parameters"


def read_checkpoint(path: Path, config: GPTConfig | None = None) -> SavedGPT:
    """Read a checkpoint of a ``GPTModule``, or one of Fabric that holds a GPT; its tensors are mapped, not copied.

    Args:
        path: the file, or the folder of a sharded one.
        config: the model's shape; ``None`` takes it from the checkpoint: from the module's hyper-parameters, or under
            ``"config"`` among what ``fabric.save`` was given.

    Raises:
        WeightsError: the file cannot be read, or holds something else; the message says what.
    """
    content = _load(path)
    prefix, state = _state_of_gpt(path, content)
    recorded = _recorded_values(content)
    if config is None:
        config = _config(path, recorded)
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in ((_plain(name), tensor) for name, tensor in state.items())
        if isinstance(tensor, Tensor) and name.startswith(prefix)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return SavedGPT(str(path), config, tensors, shapes, _tokenizer(content))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = load(path)
    except StorageError as error:
        if isinstance(cause := error.__cause__, pickle.UnpicklingError):
            reason = next(iter(str(cause).strip().splitlines()), repr(cause))
            raise WeightsError(
                f"{path} cannot be read as a checkpoint without running code that it may hold: {reason}"
            ) from error
        raise WeightsError(str(error)) from error
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}, and a checkpoint is a dictionary")
    return content


def _state_of_gpt(path: Path, content: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The ``state_dict`` that a GPT is in, and what its names begin with there."""
    values = [content.get("state_dict"), content, *content.values()]
    candidates = [value for value in values if isinstance(value, Mapping)]
    for state in candidates:
        for name in state:
            if (plain := _plain(name)) in (MARK, f"model.{MARK}"):
                return plain.removesuffix(MARK), state
    raise WeightsError(
        f"{path} holds no GPT of this package: {_described(content)}. The weights of any model alone are written by"
        f" asyncpp checkpoint convert {shlex.quote(str(path))} weights.safetensors --to weights; asyncpp export takes"
        " checkpoints of GPTModule and HFModule"
    )


def _plain(name: object) -> str:
    return str(name).replace(COMPILED, "")


def _described(content: Mapping[str, Any]) -> str:
    state = content.get("state_dict")
    if isinstance(state, Mapping):
        names = [str(name) for name in state]
        return f"its state_dict has {len(names)} entries, {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
    names = [str(name) for name in content]
    return f"its entries are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def _recorded_values(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fields of the model's config, if the checkpoint has them."""
    values = content.get("config")
    hyper_parameters = content.get(_HYPER_PARAMETERS)
    if isinstance(hyper_parameters, Mapping):
        values = hyper_parameters.get("config", values)
    return values if isinstance(values, Mapping) else None


def _config(path: Path, values: Mapping[str, Any] | None) -> GPTConfig:
    if values is None:
        raise WeightsError(
            f'{path} says nothing of the model\'s shape: it has no hyper-parameters of a GPTModule and no "config"; '
            'give --config FILE, or save it, fabric.save(path, {"model": model, "config": dataclasses.asdict(config)})'
        )
    return config_of_values(values, str(path))


def config_of_values(values: Mapping[str, Any], origin: str) -> GPTConfig:
    """A config from its fields.

    Raises:
        WeightsError: there is none with them.
    """
    try:
        return GPTConfig(**values)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{origin} holds the config of another model: {error}") from error


def _tokenizer(content: Mapping[str, Any]) -> str | None:
    """The definition that a ``TextDataModule`` wrote down, or that is among what ``fabric.save`` was given."""
    arguments = (_HYPER_PARAMETERS, _DATA_HYPER_PARAMETERS)
    for value in (content, *(value for name, value in content.items() if name not in arguments)):
        if isinstance(value, Mapping) and isinstance(definition := value.get("tokenizer"), str):
            return definition
    return None
