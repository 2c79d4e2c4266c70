"""Reading a model folder of `transformers`, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.hf.architectures import Architecture, name_there
from lightning_asyncpp.models.hf.config import config_from_json
from lightning_asyncpp.models.saved import SavedGPT, WeightsError, expected_shapes
from lightning_asyncpp.optional_packages import optional_package

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_USER = "reading and writing files of Hugging Face models"
_IGNORED = "rotary_emb.inv_freq"  # a table that old releases saved


class HFTensors(Mapping[str, Tensor]):
    """The tensors of a GPT by its own names, each read from the folder when it is asked for, in fp32.

    It holds names and paths alone: a copy can be sent to other processes.

    Args:
        config: the GPT's shape.
        architecture: whose names the files have.
        files: name of a tensor there -> the file that holds it.
        left_out: what names of tensors there begin with that no GPT has, and that need not be read.

    Attributes:
        shapes: name -> shape; tensors that no GPT has keep the name that they have there.
    """

    def __init__(
        self, config: GPTConfig, architecture: Architecture, files: Mapping[str, Path], left_out: tuple[str, ...] = ()
    ) -> None:
        if config.num_layers > len(files):
            raise WeightsError(f"num_layers={config.num_layers}, and the files have {len(files)} tensors")
        self._files = {name: path for name, path in files.items() if not name.startswith(left_out)}
        self._names = {name: _name_there(architecture, name, config) for name in expected_shapes(config)}
        self.shapes = self._read_shapes(architecture)

    def __getitem__(self, name: str) -> Tensor:
        theirs = self._names[name]
        tensor = self._read(theirs) if isinstance(theirs, str) else torch.stack([self._read(n) for n in theirs])
        return tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, name: str) -> Tensor:
        with safetensors().safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _read_shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        there = _shapes_there(self._files)
        shapes = {name: shape for name, theirs in self._names.items() if (shape := _shape(theirs, there)) is not None}
        known = {name for theirs in self._names.values() for name in ([theirs] if isinstance(theirs, str) else theirs)}
        known.add(architecture.tensors["head.weight"])  # some keep a copy of a shared matrix
        unknown = {name: s for name, s in there.items() if name not in known and not name.endswith(_IGNORED)}
        return shapes | unknown


def read_hf(folder: Path) -> SavedGPT:
    """Read what a folder of `transformers` says, and where its tensors lie; they are read when they are asked for.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, or shards of it with their index.

    Raises:
        WeightsError: it is none, or its model is no GPT; the reasons are named.
    """
    content = _json(folder / CONFIG)
    try:
        config, architecture = config_from_json(content)
    except WeightsError as error:
        raise WeightsError(f"{folder}: {error}") from error
    tensors = HFTensors(config, architecture, _files(folder), _further_layers(content, config, architecture))
    tokenizer = folder / TOKENIZER
    try:
        definition = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    except UnicodeDecodeError as error:
        raise WeightsError(f"{tokenizer} is no tokenizer.json: {error}") from error
    return SavedGPT(str(folder), config, tensors, tensors.shapes, definition)


def _further_layers(content: Mapping[str, Any], config: GPTConfig, architecture: Architecture) -> tuple[str, ...]:
    """What the names of layers begin with that predict further tokens."""
    number = content.get(architecture.further_layers)
    return tuple(f"model.layers.{config.num_layers + i}." for i in range(number if isinstance(number, int) else 0))


def _name_there(architecture: Architecture, name: str, config: GPTConfig) -> str | list[str]:
    shared = config.tie_embeddings and name == "head.weight"
    return name_there(architecture, "embedding.token.weight" if shared else name, config)


def _files(folder: Path) -> dict[str, Path]:
    """Name of a tensor -> the file that holds it."""
    if (folder / INDEX).is_file():
        content = _json(folder / INDEX).get("weight_map")
        if not isinstance(content, dict):
            raise WeightsError(f"{folder / INDEX} is damaged: it has no weight_map")
        files = {str(name): folder / str(file) for name, file in content.items()}
        missing = sorted({path.name for path in files.values() if not path.is_file()})
        if missing:
            raise WeightsError(f"{folder}: {', '.join(missing)}, which {INDEX} lists, cannot be found")
        return files
    if not (folder / WEIGHTS).is_file():
        raise WeightsError(f"{folder} has neither {WEIGHTS} nor {INDEX}; other formats have to be converted first")
    return dict.fromkeys(_headers(folder / WEIGHTS), folder / WEIGHTS)


def _shapes_there(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        shapes |= {name: shape for name, shape in _headers(path).items() if files.get(name) == path}
    return shapes


def _headers(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a file."""
    try:
        with safetensors().safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except safetensors().SafetensorError as error:
        raise WeightsError(f"{path} is damaged, or no safetensors file: {error}") from error


def _shape(name: str | list[str], there: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Shape of a tensor of the GPT; ``None`` if it is not there, or its parts do not fit together."""
    if isinstance(name, str):
        return there.get(name)
    shapes = {there.get(part) for part in name}
    only = shapes.pop() if len(shapes) == 1 else None
    return None if only is None else (len(name), *only)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise WeightsError(f"{path} cannot be found")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return content


def safetensors() -> Any:
    """Return the package, with its functions for torch imported.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    optional_package("safetensors.torch", _USER)
    return optional_package("safetensors", _USER)
