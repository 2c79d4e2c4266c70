"""What every stage has of its own beside weights and optimizer, such as an average of weights in a callback's state.

A checkpoint holds it as one process would write it: mappings of all stages are united by their keys. Beside that it has
the difference between what is united and what each stage had, from which the same stages get back exactly their own.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, time, timedelta
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_asyncpp.core.checkpoint.gathering import gather_stages
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh

APART = "apart"
"""Entry of the pipeline's part of a checkpoint that holds the differences."""
KEYS, BELOW, VALUE = "keys", "below", "value"
_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)
_READABLE = (enum.Enum, PurePath, timedelta, date, time, np.generic, set, frozenset)
_OPAQUE, _ARRAY = "__of_another_process__", "__array__"
_MISSING = object()


class Union(NamedTuple):
    """What stages hold, united.

    Attributes:
        value: what one process would hold.
        differences: stage -> how what it had differs; None: it had the same.
    """

    value: Any
    differences: list[Any]


def fingerprint(tree: Any) -> str:
    """The same text for the same nested content, whichever process it is in; of other objects only the class counts."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest.update, tree)
    return digest.hexdigest()


def sendable(tree: Any) -> Any:
    """The content as another process reads it without running code; :func:`readable` makes it what it was."""
    if isinstance(tree, Mapping):
        return {key: sendable(child) for key, child in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(sendable(child) for child in tree)
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(tree.copy())}
    if isinstance(tree, Tensor) or type(tree) in _PLAIN or (type(tree) is set and all(type(e) in _PLAIN for e in tree)):
        return tree
    return {_OPAQUE: type(tree).__qualname__}


def readable(sent: Any, own: Any = None, path: str = "", lost: list[str] | None = None) -> Any:
    """What :func:`sendable` was given; an object that could not be sent is this process's own one.

    Args:
        sent: what came.
        own: the same of this process.
        path: of the content, for ``lost``.
        lost: gets the paths of objects that this process has none of; ``None`` is in their place.
    """
    if isinstance(sent, Mapping) and _OPAQUE in sent:
        if own is None and lost is not None:
            lost.append(f"{path} ({sent[_OPAQUE]})")
        return own
    if isinstance(sent, Mapping) and _ARRAY in sent:
        return sent[_ARRAY].numpy()
    if isinstance(sent, Mapping):
        of = own.get if isinstance(own, Mapping) else _nothing
        return {key: readable(child, of(key), f"{path}[{key!r}]", lost) for key, child in sent.items()}
    if type(sent) in (list, tuple):
        mine = own if type(own) in (list, tuple) and len(own) == len(sent) else [None] * len(sent)
        return type(sent)(readable(c, o, f"{path}[{i}]", lost) for i, (c, o) in enumerate(zip(sent, mine)))
    return sent


def unite(values: Sequence[Any]) -> Union:
    """Unite what the stages have, first stage first; of different values under a key the last one's counts.

    Raises:
        ValueError: there is none.
    """
    prints = [None if value is _MISSING else fingerprint(value) for value in values]
    present = [index for index, value in enumerate(values) if value is not _MISSING]
    if not present:
        raise ValueError("there is nothing to unite")
    if len({prints[index] for index in present}) == 1:
        return Union(values[present[-1]], [None] * len(values))
    if all(_is_mapping(values[index]) for index in present):
        return _unite_mappings(values, present)
    kept = present[-1]
    differs = [index in present and prints[index] != prints[kept] for index in range(len(values))]
    return Union(values[kept], [{VALUE: v} if d else None for v, d in zip(values, differs)])


def own_again(united: Any, difference: Any) -> Any:
    """What a stage had, of what is united and how it differed."""
    if difference is None:
        return united
    if VALUE in difference:
        return difference[VALUE]
    below = difference[BELOW]
    return {key: own_again(united[key], below.get(key)) for key in difference[KEYS]}


def without(united: Any, differences: Sequence[Any], is_elsewhere: Callable[[Any], bool]) -> Any:
    """What a stage of another cut gets: of mappings that were united, not the keys that belong elsewhere.

    Args:
        united: what all stages had.
        differences: of each of them.
        is_elsewhere: whether a key is the name of something that another stage holds now.
    """
    mappings = [d for d in differences if d is not None and KEYS in d]
    if not mappings:
        return united
    few = {key for key in united if any(key not in d[KEYS] for d in mappings)}
    below = {key: [d[BELOW].get(key) for d in mappings] for key in united}
    return {
        key: without(value, below[key], is_elsewhere)
        for key, value in united.items()
        if not (key in few and is_elsewhere(key))
    }


def conflicts(differences: Sequence[Any], path: str = "") -> list[str]:
    """Where stages had different values under the same keys."""
    found = [path] if any(d is not None and VALUE in d for d in differences) else []
    mappings = [d for d in differences if d is not None and KEYS in d]
    for key in dict.fromkeys(key for d in mappings for key in d[BELOW]):
        found += conflicts([d[BELOW].get(key) for d in mappings], f"{path}[{key!r}]")
    return found


class Names:
    """Tells whether a key of a callback's mapping is the name of something that another stage holds.

    Args:
        here: names of parameters and buffers in the model that this stage holds.
        elsewhere: those that it does not.
    """

    def __init__(self, here: Collection[str], elsewhere: Collection[str]) -> None:
        self._here, self._elsewhere = frozenset(here), frozenset(elsewhere)

    def is_elsewhere(self, key: Any) -> bool:
        """Whether the longest name that the key ends with is another stage's: ``"module.0.weight"`` is ``0.weight``."""
        return self._name_in(key) in self._elsewhere

    def of_this_stage(self, tree: Any) -> Any:
        """Nested mappings, of those that have names of the model for keys without what is elsewhere."""
        if not isinstance(tree, Mapping) or not tree:
            return tree
        if all(self._name_in(key) for key in tree):
            return {key: child for key, child in tree.items() if not self.is_elsewhere(key)}
        return {key: self.of_this_stage(child) for key, child in tree.items()}

    def _name_in(self, key: Any) -> str:
        parts = str(key).split(".")
        names = (".".join(parts[begin:]) for begin in range(len(parts)))
        return next((name for name in names if name in self._here or name in self._elsewhere), "")


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


def _unite_mappings(values: Sequence[Any], present: Sequence[int]) -> Union:
    keys = list(dict.fromkeys(key for index in present for key in values[index]))
    below = {key: unite([values[i].get(key, _MISSING) if i in present else _MISSING for i in range(len(values))])
             for key in keys}  # fmt: skip
    differences: list[Any] = []
    for index, value in enumerate(values):
        own = {k: u.differences[index] for k, u in below.items() if u.differences[index] is not None}
        same = index not in present or (len(value) == len(keys) and not own)
        differences.append(None if same else {KEYS: list(value), BELOW: own})
    return Union({key: union.value for key, union in below.items()}, differences)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and _OPAQUE not in value and _ARRAY not in value


def _nothing(_: Any) -> None:
    return None


def _feed(update: Callable[[Any], None], node: Any) -> None:
    if isinstance(node, Mapping):
        update(b"{")
        for key in sorted(node, key=repr):
            update(repr(key).encode())
            _feed(update, node[key])
        update(b"}")
    elif isinstance(node, (list, tuple)):
        update(b"[")
        for child in node:
            _feed(update, child)
        update(b"]")
    elif isinstance(node, Tensor) and not node.is_meta and node.layout == torch.strided:
        update(f"{node.dtype}{tuple(node.shape)}".encode())
        update(node.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    elif isinstance(node, np.ndarray) and node.dtype != object:
        update(f"{node.dtype}{node.shape}".encode())
        update(np.ascontiguousarray(node).tobytes())
    elif type(node) in _PLAIN or isinstance(node, _READABLE):
        text = sorted(map(repr, node)) if isinstance(node, (set, frozenset)) else repr(node)
        update(f"{type(node).__name__}{text};".encode())
    else:
        update(type(node).__qualname__.encode())
