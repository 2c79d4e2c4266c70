"""Opening saved weights, whatever they are, and starting a model from them instead of random ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_asyncpp.models.checkpoint import read_checkpoint
from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.gpt import GPT
from lightning_asyncpp.models.saved import SavedGPT, WeightsError, differences
from lightning_asyncpp.storage.folders import is_sharded


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
