"""Starting a model from saved weights instead of random ones, each unit from its own tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.errors import WeightsError
from lightning_asyncpp.models.gpt import GPT
from lightning_asyncpp.models.opening import open_saved
from lightning_asyncpp.models.saved import SavedGPT
from lightning_asyncpp.models.values import differences


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
