"""Opening saved weights, whatever they are, and starting a model from them instead of random ones.

Checkpoints that the Trainer and Fabric write are read without running code that they may hold.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.gpt import GPT
from lightning_asyncpp.models.saved import SavedGPT, WeightsError, differences
from lightning_asyncpp.storage import StorageError, is_sharded, load

_MARK = "embedding.token.weight"  # what the state_dict of a GPT has and no other model
_COMPILED = "_orig_mod."
_HYPER_PARAMETERS = "hyper_parameters"
_DATA_HYPER_PARAMETERS = "datamodule_hyper_parameters"


def open_saved(path: str | Path, config: GPTConfig | None = None) -> SavedGPT:
    """Open a checkpoint, in one file or sharded, or a folder with config.json and safetensors.

    Args:
        path: the file or folder.
        config: the shape of a model whose checkpoint does not say it.

    Raises:
        WeightsError: it is neither, or holds no GPT.
    """
    path = Path(path).expanduser()
    if path.is_file() or is_sharded(path):
        return read_checkpoint(path, config)
    if (path / "config.json").is_file():
        if config is not None:
            raise WeightsError(f"{path} has a config.json; leave the other config out")
        from lightning_asyncpp.models.hf import read_hf  # needs a package that checkpoints do not

        return read_hf(path)
    if path.is_dir():
        raise WeightsError(
            f"{path} is a folder without index.json and config.json; name a checkpoint, or a folder of transformers"
        )
    if path.exists():  # and is neither
        raise WeightsError(f"{path} is no regular file: name a checkpoint, or a copy of what comes from there")
    raise WeightsError(f"{path}: there is no such file or folder; models of a hub have to be downloaded first")


def start_problems(config: GPTConfig, path: str | Path) -> list[str]:
    """What keeps a model of a config from starting with the weights at ``path``: files, sizes, tensors."""
    try:
        saved = open_saved(path)
        problems = differences(config, saved.config)
        if not problems:
            saved.check()
    except (WeightsError, ImportError, OSError) as error:
        return [str(error)]
    return problems


def start_from(model: GPT, path: str | Path) -> None:
    """Let a model start with the weights of a checkpoint, or of a folder of `transformers`, in fp32.

    A unit that is on the meta device takes them when its ``reset_parameters()`` is called, from its own tensors alone:
    under a pipeline every stage reads what it holds. A unit with real weights takes them at once.

    Args:
        model: whose weights are replaced.
        path: the checkpoint or folder.

    Raises:
        WeightsError: the weights are not those of such a model; all differences are named.
    """
    if problems := start_problems(model.config, path):
        raise WeightsError.from_problems(f"the model cannot start from {path}", problems)
    source = _Source(str(path))
    names = {id(module): name for name, module in model.named_modules()}
    for unit in model.pipeline_layers():
        take = partial(_take, unit, names[id(unit)], source)
        if any(parameter.is_meta for parameter in unit.parameters()):
            # In the place of the method of its class: whoever materialises a unit calls it, and nothing else.
            unit.__dict__["reset_parameters"] = take
        else:
            take()


class _Source:
    """Saved weights, opened when they are first read; a copy of a model does not copy them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._saved: SavedGPT | None = None

    def get(self) -> SavedGPT:
        if self._saved is None:
            self._saved = open_saved(self._path)
        return self._saved

    def __deepcopy__(self, memo: dict[int, Any]) -> _Source:
        return self

    def __reduce__(self) -> tuple[type[_Source], tuple[str]]:
        return _Source, (self._path,)


@torch.no_grad()
def _take(unit: nn.Module, name: str, source: _Source) -> None:
    """Initialise a unit, and put the saved tensors in the place of the random ones."""
    type(unit).reset_parameters(unit)  # type: ignore[attr-defined]  # tables and the like are in no file
    tensors = source.get().tensors
    unit.load_state_dict({own: tensors[f"{name}.{own}"] for own in unit.state_dict()})


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
            if (plain := _plain(name)) in (_MARK, f"model.{_MARK}"):
                return plain.removesuffix(_MARK), state
    raise WeightsError(
        f"{path} holds no GPT of this package: {_described(content)}. The weights of any model alone are written by"
        f" asyncpp checkpoint convert {shlex.quote(str(path))} weights.safetensors --to weights; asyncpp export takes"
        " checkpoints of GPTModule and HFModule"
    )


def _plain(name: object) -> str:
    return str(name).replace(_COMPILED, "")


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
