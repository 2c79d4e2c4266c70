"""Ranks compare what they were started with, before anything is spent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from lightning_asyncpp.core.manifest import Section, in_words, text_of
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.alike import raised_alike
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError

SAME = "all ranks of a run must be started with the same script, recipe, arguments and versions"


def agree_on_sections(
    mesh: Mesh,
    sections: Mapping[str, Section],
    group: dist.ProcessGroup | None = None,
    known: Mapping[str, Section] | None = None,
) -> None:
    """Refuse to go on where ranks differ in sections of their manifests; a blocking collective.

    Args:
        mesh: this rank's place.
        sections: name -> values by their names; what some ranks do not name is compared among the others.
        group: of all ranks, over gloo, while the mesh has none.
        known: what else is compared if they differ, so that nobody finds it out one start later.

    Raises:
        ConfigurationError: on every rank, with all differences, side by side.
    """
    found = [p for name, section in sections.items() for p in differences_between_ranks(mesh, name, section, group)]
    if found:
        for name, section in (known or {}).items():
            found += differences_between_ranks(mesh, name, section, group)
        raise raised_alike(ConfigurationError.from_problems(found, SAME), mesh.rank)


def differences_between_ranks(
    mesh: Mesh, name: str, section: Section, group: dist.ProcessGroup | None = None
) -> list[str]:
    """In what ranks differ in a section of their manifests, in words: the same on all; a blocking collective.

    They exchange digests, and the whole only if these differ.

    Args:
        mesh: this rank's place.
        name: of the section.
        section: name -> plain value.
        group: of all ranks, over gloo, while the mesh has none.
    """
    mine = text_of(section)
    if len(set(exchange(mesh, hashlib.sha256(mine.encode()).hexdigest(), group))) == 1:
        return []
    return _problems(mesh, name, [json.loads(text) for text in exchange(mesh, mine, group)])


def agree_on_run(mesh: Mesh, run: str, group: dist.ProcessGroup | None = None) -> str:
    """The name of the run on rank 0; a blocking collective."""
    return exchange(mesh, run, group)[0]


def _problems(mesh: Mesh, section: str, by_rank: Sequence[dict[str, Any]]) -> list[str]:
    names = {name: None for values in by_rank for name in values}
    found = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            if name in values:
                ranks_of.setdefault(text_of(values[name]), []).append(rank)
        if len(ranks_of) > 1:
            words = in_words([json.loads(text) for text in ranks_of])
            sides = [f"{word} on {_ranks(mesh, ranks)}" for word, ranks in zip(words, ranks_of.values())]
            found.append(f"ranks differ in {section} {name}: it is {', '.join(sides[:-1])} and {sides[-1]}")
    return found


def _ranks(mesh: Mesh, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} (stage {mesh.stage_of(ranks[0])})"
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"ranks {shown}"
