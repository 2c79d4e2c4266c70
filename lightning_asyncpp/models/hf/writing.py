"""Writing a model folder that `transformers` loads, shard by shard."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.models.hf.architectures import Architecture, name_there
from lightning_asyncpp.models.hf.config import architecture_of, config_json
from lightning_asyncpp.models.hf.reading import CONFIG, INDEX, WEIGHTS, safetensors
from lightning_asyncpp.models.saved import SavedGPT, WeightsError, expected_shapes
from lightning_asyncpp.storage import replace_durably, usual_mode

GENERATION_CONFIG = "generation_config.json"
_FOR_TORCH = {"format": "pt"}


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
        model: what to write.
        folder: where to; it must not exist, or be empty.
        dtype: of the weights; ``None`` for the one that they have, or the widest that any has.
        max_shard_bytes: most bytes of tensors per file, as long as a single tensor is not larger.
        end: id of the token that ends a document; ``None`` if there is none.
        files: further files to write, name -> content.

    Returns:
        The class of `transformers` that loads it.

    Raises:
        WeightsError: no class computes what the model computes, the weights are not those of its config, or the folder
            is in use.
    """
    architecture = architecture_of(model.config)
    model.check()
    _check_tie(model)
    with new_folder(folder) as temporary:
        dtype = dtype or _widest_dtype(model, architecture)
        _write_weights(model, architecture, temporary, dtype, max_shard_bytes)
        config = config_json(model.config, architecture, str(dtype).removeprefix("torch."), end)
        generation = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
        _write_json(temporary / CONFIG, config)
        _write_json(temporary / GENERATION_CONFIG, generation)
        for name, content in (files or {}).items():
            (temporary / name).write_text(content, encoding="utf-8")
    return architecture


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Write a folder under another name, and give it its own at the end; nothing is left behind otherwise.

    Raises:
        WeightsError: there is something of that name.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists already; name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp keeps other users out
        replace_durably(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(
    model: SavedGPT, architecture: Architecture, folder: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    shards = _shards(model, architecture, dtype, max_shard_bytes)

    def save(tensors: dict[str, Tensor], file: Path) -> None:
        with usual_mode(file):
            safetensors().torch.save_file(tensors, file, metadata=_FOR_TORCH)

    if len(shards) == 1:
        save(dict(_tensors(model, architecture, shards[0], dtype)), folder / WEIGHTS)
        return
    weight_map, total = {}, 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = dict(_tensors(model, architecture, names, dtype))
        save(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(model: SavedGPT, architecture: Architecture, dtype: torch.dtype, limit: int) -> list[list[str]]:
    """Names of the GPT's tensors by the file that they go to, in the order of the layers."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in expected_shapes(model.config).items():
        if name == "head.weight" and model.config.tie_embeddings:
            continue  # transformers shares the matrix by itself
        size = _dtype_there(architecture, name, dtype).itemsize * torch.Size(shape).numel()
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _tensors(
    model: SavedGPT, architecture: Architecture, names: Sequence[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = model.tensors[name].to(_dtype_there(architecture, name, dtype)).contiguous()
        theirs = name_there(architecture, name, model.config)
        if isinstance(theirs, str):
            yield theirs, tensor
        else:
            yield from zip(theirs, tensor.unbind())


def _dtype_there(architecture: Architecture, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(architecture.always_fp32) else dtype


def _widest_dtype(model: SavedGPT, architecture: Architecture) -> torch.dtype:
    """The dtype that all weights can be written in without rounding any."""
    names = [name for name in model.shapes if not name.endswith(architecture.always_fp32)]
    return functools.reduce(torch.promote_types, (model.tensors[name].dtype for name in names))


def _check_tie(model: SavedGPT) -> None:
    if not model.config.tie_embeddings:
        return
    embedding, head = model.tensors["embedding.token.weight"], model.tensors["head.weight"]
    if not torch.equal(embedding, head):
        raise WeightsError(
            f"{model.origin}: tie_embeddings=True, and embedding.token.weight and head.weight differ by up to "
            f"{float((embedding.float() - head.float()).abs().max()):.3g}; only one of them could be written"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
