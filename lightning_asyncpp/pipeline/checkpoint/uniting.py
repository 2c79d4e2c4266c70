"""Brings what stages keep apart beside weights and optimizers into a checkpoint; see the module ``apart`` beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_asyncpp.pipeline.checkpoint.apart import (
    APART,
    BELOW,
    KEYS,
    Names,
    conflicts,
    fingerprint,
    own_again,
    readable,
    sendable,
    unite,
    without,
)
from lightning_asyncpp.pipeline.checkpoint.gathering import gather_stages
from lightning_asyncpp.pipeline.ranks.agreement import exchange
from lightning_asyncpp.pipeline.ranks.mesh import Mesh


class United(NamedTuple):
    """What stages differ in, on rank 0; empty elsewhere and where they all have the same.

    Attributes:
        entries: name -> what one process would have.
        differences: of each stage, first stage first.
        lost: what other stages alone have that cannot travel between processes, in words.
    """

    entries: dict[str, Any]
    differences: list[Any]
    lost: list[str]


def unite_entries(
    mesh: Mesh, own: Mapping[str, Any], described: Callable[[str], str], marks: Mapping[str, str] | None = None
) -> United:
    """Unite the entries that the stages of the first replica do not have alike; a blocking collective.

    Args:
        mesh: this rank's place.
        own: name -> what this stage has; nested dictionaries, lists and tuples of tensors and plain values.
        described: name -> how messages call the entry.
        marks: name -> text to compare instead of the content.
    """
    prints = {name: fingerprint(value) for name, value in own.items() if name not in (marks or {})}
    by_rank = [json.loads(text) for text in exchange(mesh, json.dumps({**prints, **(marks or {})}))]
    of_stages = [by_rank[mesh.rank_of(stage, replica=0)] for stage in range(mesh.num_stages)]
    names = dict.fromkeys(name for stage in of_stages for name in stage)
    differing = [name for name in names if len({stage.get(name) for stage in of_stages}) > 1]
    stages = gather_stages(mesh, {n: sendable(own[n]) for n in differing if n in own}) if differing else []
    lost: list[str] = []
    if not stages:
        return United({}, [], lost)
    value, differences = unite(stages)
    entries = {name: readable(value[name], own.get(name), described(name), lost) for name in differing}
    return United(entries, readable(differences, None, "what a stage has of its own", lost), lost)


def own_entries(
    mesh: Mesh,
    partition: Sequence[int],
    names: Names,
    entries: Mapping[str, Any],
    state: Mapping[str, Any],
    described: Callable[[str], str],
) -> tuple[dict[str, Any], list[str]]:
    """What this stage had of entries of a checkpoint; of those of another cut what belongs to it now, by its names.

    Args:
        mesh: this rank's place.
        partition: layers on each stage.
        names: of the model, here and elsewhere.
        entries: name -> what the checkpoint has.
        state: the pipeline's part of the checkpoint.
        described: name -> how messages call the entry.

    Returns:
        The entries, without those that this stage did not have, and where stages had values that cannot be assigned.
    """
    differences = state.get(APART)
    if not differences:
        if state["num_stages"] == 1 < mesh.num_stages:  # it did not have to tell names of layers from other keys
            return {name: names.of_this_stage(value) for name, value in entries.items()}, []
        return dict(entries), []
    if state["num_stages"] == mesh.num_stages and list(state["partition"]) == list(partition):
        difference = differences[mesh.stage]
        if difference is None:
            return dict(entries), []
        known = {name for d in differences if d is not None for name in d[KEYS]}
        own = {name: value for name, value in entries.items() if name not in known or name in difference[KEYS]}
        return {name: own_again(value, difference[BELOW].get(name)) for name, value in own.items()}, []
    below = [d[BELOW] for d in differences if d is not None]
    found = {name: [b.get(name) for b in below] for name in entries}
    unclear = [where for name, ds in found.items() for where in conflicts(ds, described(name))]
    return {name: without(value, found[name], names.is_elsewhere) for name, value in entries.items()}, unclear


def cannot_be_assigned(unclear: Sequence[str], state: Mapping[str, Any]) -> str:
    """What a run on other stages goes on with."""
    return (
        f"{', '.join(unclear)}: in the checkpoint each of its {state['num_stages']} stages has a value of its own under"
        " the same key, and this run has other stages: all get the last stage's. Go on with"
        f" partition={list(state['partition'])}, or keep it by names of parameters"
    )


def cannot_travel(lost: list[str]) -> str:
    """What a checkpoint does not have, and why."""
    return (
        f"not in the checkpoint: {', '.join(lost)}, which only other stages than rank 0's have: objects of a class of"
        " their own do not travel between ranks; keep tensors, numbers and texts, in dictionaries and lists"
    )
