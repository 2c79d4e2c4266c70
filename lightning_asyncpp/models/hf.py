"""Conversion between GPTs of this package and model folders of `transformers`, without importing `transformers`.

Tensors are read one at a time, so that every stage reads only the tensors of its layers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_asyncpp.models.architectures import ARCHITECTURES, Architecture, name_there
from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.saved import TRAINING_ONLY, SavedGPT, WeightsError, expected_shapes, values_of
from lightning_asyncpp.storage import atomic_write

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
_IGNORED = "rotary_emb.inv_freq"  # a table that old releases saved
_ROPE = ("rope_type", "rope_theta", "partial_rotary_factor")
_FOLLOWING = ("num_key_value_heads", "head_dim")  # if missing, they follow from num_attention_heads
_ABSENT = object()


# -- folders -----------------------------------------------------------------------------------------------------------


class HFTensors(Mapping[str, Tensor]):
    """Tensors of a GPT in fp32, by their names in its ``state_dict``; each is read from its file when it is accessed.

    The mapping itself holds only names, paths and shapes, so that copies of it can be sent to other processes.

    Args:
        config: shape of the GPT.
        architecture: class of `transformers` whose tensor names the files use.
        files: path of each tensor's file, by the tensor's name in the file.

    Attributes:
        shapes: name -> shape of the tensors in the files; the name in the GPT, or in the file if the GPT lacks it.
    """

    def __init__(self, config: GPTConfig, architecture: Architecture, files: Mapping[str, Path]) -> None:
        if config.num_layers > len(files):
            raise WeightsError(f"num_layers={config.num_layers} does not fit files with {len(files)} tensors")
        self._files = files
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
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _read_shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        there = _shapes_there(self._files)
        shapes = {name: shape for name, theirs in self._names.items() if (shape := _shape(theirs, there)) is not None}
        known = {name for theirs in self._names.values() for name in ([theirs] if isinstance(theirs, str) else theirs)}
        known.add(architecture.tensors["head.weight"])  # with tied embeddings, some files have a second copy
        unknown = {name: s for name, s in there.items() if name not in known and not name.endswith(_IGNORED)}
        return shapes | unknown


def read_hf(folder: Path) -> SavedGPT:
    """Read a folder of `transformers`; its tensors are read when they are accessed.

    Args:
        folder: folder with ``config.json`` and ``model.safetensors``, or shards of it with their index.

    Raises:
        WeightsError: the folder does not contain a model, or the model is not a GPT; the message gives all reasons.
    """
    content = _json(folder / CONFIG)
    try:
        config, architecture = config_from_json(content)
    except WeightsError as error:
        raise WeightsError(f"{folder}: {error}") from error
    tensors = HFTensors(config, architecture, _files(folder))
    tokenizer = folder / TOKENIZER
    definition = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    return SavedGPT(str(folder), config, tensors, tensors.shapes, definition)


def _name_there(architecture: Architecture, name: str, config: GPTConfig) -> str | list[str]:
    shared = config.tie_embeddings and name == "head.weight"
    return name_there(architecture, "embedding.token.weight" if shared else name, config)


def _files(folder: Path) -> dict[str, Path]:
    """Return the path of each tensor's file, by the tensor's name in the file."""
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
    """Return the shapes of the tensors of a file, by name."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise WeightsError(f"{path} is damaged, or is not a safetensors file: {error}") from error


def _shape(name: str | list[str], there: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of a tensor of the GPT; ``None`` if a part is missing or parts differ in shape."""
    if isinstance(name, str):
        return there.get(name)
    shapes = {there.get(part) for part in name}
    only = shapes.pop() if len(shapes) == 1 else None
    return None if only is None else (len(name), *only)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{path} cannot be read, or is not a JSON object: {error}") from error


def write_hf(
    model: SavedGPT,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    end: int | None = None,
    files: Mapping[str, str] | None = None,
) -> Architecture:
    """Write config.json, generation_config.json and the weights of a model.

    Args:
        model: model to write.
        folder: new or empty folder.
        dtype: dtype of the written weights; ``None`` for the one that represents all of the model's weights exactly.
        max_shard_bytes: maximum bytes of tensors per file; a single tensor may be larger.
        end: id of the token that ends a document; ``None`` if there is none.
        files: contents of further files to write, by name.

    Returns:
        The class of `transformers` that loads the folder.

    Raises:
        WeightsError: no class can represent the model, the weights do not fit its config, or the folder is not
            empty.
    """
    architecture = architecture_of(model.config)
    model.check()
    with new_folder(folder) as temporary:
        dtype = dtype or _widest_dtype(model, architecture)
        save_torch_state_dict(dict(_tensors(model, architecture, dtype)), temporary, max_shard_size=max_shard_bytes)
        config = config_json(model.config, architecture, str(dtype).removeprefix("torch."), end)
        generation = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
        _write_json(temporary / CONFIG, config)
        _write_json(temporary / GENERATION_CONFIG, generation)
        for name, content in (files or {}).items():
            (temporary / name).write_text(content, encoding="utf-8")
    return architecture


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``folder`` at the end; after an error in the context, nothing remains.

    Raises:
        WeightsError: the folder exists and is not empty.
        StorageError: the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists already; name another folder, or remove it")
    with atomic_write(folder) as temporary:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors writes files that only their owner can read


def _tensors(model: SavedGPT, architecture: Architecture, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name in expected_shapes(model.config):
        if name == "head.weight" and model.config.tie_embeddings:
            continue  # transformers ties the matrix when it loads the folder
        tensor = model.tensors[name].to(_dtype_there(architecture, name, dtype)).contiguous()
        theirs = name_there(architecture, name, model.config)
        if isinstance(theirs, str):
            yield theirs, tensor
        else:
            yield from ((name, part.clone()) for name, part in zip(theirs, tensor.unbind()))


def _dtype_there(architecture: Architecture, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(architecture.always_fp32) else dtype


def _widest_dtype(model: SavedGPT, architecture: Architecture) -> torch.dtype:
    """Return the dtype in which all weights can be written without rounding."""
    names = [name for name in model.shapes if not name.endswith(architecture.always_fp32)]
    return functools.reduce(torch.promote_types, (model.tensors[name].dtype for name in names))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- config.json -------------------------------------------------------------------------------------------------------


def architecture_of(config: GPTConfig) -> Architecture:
    """Return the class of `transformers` that can represent a GPT.

    Raises:
        WeightsError: no class can; the message says what each of them lacks.
    """
    values = values_of(config)
    lacking = {architecture: _lacking(architecture, values) for architecture in ARCHITECTURES}
    for architecture, problems in lacking.items():
        if not problems:
            return architecture
    listed = [f"{a.class_name} {problem}" for a, problems in lacking.items() for problem in problems]
    raise WeightsError.from_problems("no class of transformers computes what this model computes", listed)


def config_json(config: GPTConfig, architecture: Architecture, dtype: str, end: int | None) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        config: config of the GPT.
        architecture: class of `transformers` that represents the GPT.
        dtype: torch's name of the weights' dtype.
        end: id of the token that ends a document; ``None`` if there is none.
    """
    values = values_of(config)
    flat = dict(architecture.constants) | {theirs: values[ours] for ours, theirs in architecture.values.items()}
    # Releases of transformers before 5 read `torch_dtype`, and the rotary settings at the top level. Special tokens are
    # set to None explicitly, since the class has defaults for them.
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **{key: value for key, value in flat.items() if key != "rope_type"},
        "rope_parameters": {key: flat[key] for key in _ROPE},
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def config_from_json(content: Mapping[str, Any]) -> tuple[GPTConfig, Architecture]:
    """Return the config of the GPT that a config.json describes, and the class of `transformers` that the file names.

    Raises:
        WeightsError: the class is unknown, or its model is not a GPT; the message gives all reasons.
    """
    architecture = _named_architecture(content)
    flat = dict(architecture.defaults) | _flattened(content, architecture)
    problems = [f"{key}: is missing" for key in architecture.values.values() if key not in (*flat, *_FOLLOWING)]
    problems += [
        f"{key}={flat[key]!r}: a GPT of this package supports only {expected!r}"
        for key, expected in architecture.constants.items()
        if flat.get(key, _ABSENT) not in (expected, _ABSENT)
    ]
    if content.get("quantization_config"):
        problems.append(
            "quantization_config: the weights are quantised; give the model in float32, bfloat16 or float16"
        )
    if problems:
        raise WeightsError.from_problems(
            f"config.json of a {architecture.class_name} that no GPT of this package can represent", problems
        )
    given = {ours: flat[theirs] for ours, theirs in architecture.values.items() if theirs in flat}
    return _built({**architecture.required, **given}), architecture


def _lacking(architecture: Architecture, values: Mapping[str, Any]) -> list[str]:
    """Return the features of a model that a class of `transformers` lacks."""
    has_experts = "moe.num_experts" in architecture.values
    if has_experts != ("moe.num_experts" in values):
        return ["has experts, and the model has none" if has_experts else "has no experts, and the model has some"]
    problems = []
    for name, value in values.items():
        if name in architecture.values or name in TRAINING_ONLY | architecture.unused | {"moe"}:
            continue
        if name not in architecture.required:
            problems.append(f"does not know {name}={value!r}")
        elif value != architecture.required[name]:
            problems.append(f"has {name}={architecture.required[name]!r} only, and the model has {value!r}")
    return problems + [
        f"has a {name} of at least {least}, and the model has {values[name]!r}"
        for name, least in architecture.least.items()
        if values[name] < least
    ]


def _named_architecture(content: Mapping[str, Any]) -> Architecture:
    known = {a.model_type: a for a in ARCHITECTURES}
    listed = ", ".join(f"{a.model_type!r} ({a.class_name})" for a in ARCHITECTURES)
    model_type = str(content.get("model_type"))
    if model_type not in known:
        raise WeightsError(f"config.json has model_type={model_type!r}, but only these can be read: {listed}")
    architecture = known[model_type]
    classes = content.get("architectures") or [architecture.class_name]
    if not isinstance(classes, list) or architecture.class_name not in classes:
        raise WeightsError(f"config.json has architectures={classes!r}, but only these can be read: {listed}")
    return architecture


def _flattened(content: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return config.json without nulls, and with rotary settings at the top level as in `transformers` before 5.0."""
    given = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope = dict(given) if isinstance(given, Mapping) else {"rope_type": given}
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    if any(isinstance(value, Mapping) for value in rope.values()):
        rope = {"rope_type": "one per type of layer"}
    flat = dict(content) | {key: rope[key] for key in _ROPE if key in rope}
    renamed = {key: flat[alias] for alias, key in architecture.aliases.items() if alias in flat}
    return {key: value for key, value in (renamed | flat).items() if value is not None}


def _built(values: Mapping[str, Any]) -> GPTConfig:
    """Build a config from values by name; ``outer.inner`` is a field of a nested config."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            nested[name] = value
    try:
        return GPTConfig(**nested)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"config.json does not describe a GPT: {error}") from error
