"""All ranks compare once what they were started with: settings, versions, the model and the optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.alike import raised_alike
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError

_REMEDY = "start all ranks with the same script, recipe, arguments and versions"
_MOST = 8  # differences that are named
_NUMBERS = (bool, int, float, str, tuple, list, type(None))


def compare_ranks(mesh: Mesh, entries: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Compare this rank's entries with those of rank 0; a blocking collective.

    Ranks exchange one hash each, and the entries themselves only if the hashes differ.

    Args:
        mesh: this rank's place.
        entries: name -> value, in words.
        group: of all ranks, over gloo, while the mesh has none.

    Raises:
        ConfigurationError: on every rank, if one differs; names the entries with both values.
    """
    text = json.dumps(entries, sort_keys=True)
    if len(set(exchange(mesh, hashlib.sha256(text.encode()).hexdigest(), group))) == 1:
        return
    first, *others = [json.loads(other) for other in exchange(mesh, text, group)]
    differing: dict[str, str] = {}  # named once, with the first rank that differs
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if (expected := first.get(name, "missing")) != (found := other.get(name, "missing")):
                differing.setdefault(name, f"{name} is {expected} on rank 0 and {found} on rank {rank}")
    raise raised_alike(ConfigurationError.from_problems(list(differing.values())[:_MOST], _REMEDY), mesh.rank)


def parameter_entries(model: nn.Module) -> dict[str, str]:
    """Names, shapes and dtypes of a whole model's parameters."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {f"parameter {name}": f"{list(parameter.shape)} {parameter.dtype}" for name, parameter in parameters}


def optimizer_entries(optimizer: Optimizer) -> dict[str, str]:
    """The class of a whole model's optimizer, and the options of its groups."""
    return {
        "optimizer": type(optimizer).__name__,
        **{
            f"optimizer group {index} {name}": _plain(value)
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name not in ("params", "param_names")
        },
    }


def _plain(value: Any) -> str:
    value = value.tolist() if isinstance(value, Tensor) else value
    return repr(value) if isinstance(value, _NUMBERS) else type(value).__name__
