"""All ranks compare once what they were started with: the arguments of the strategy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch.distributed as dist

from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.alike import raised_alike
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError

_REMEDY = "start all ranks with the same script, recipe and arguments"


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
    raise raised_alike(ConfigurationError.from_problems(list(differing.values()), _REMEDY), mesh.rank)
