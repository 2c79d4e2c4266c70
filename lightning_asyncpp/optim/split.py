"""Which parameter goes to the rule for matrices (Muon and its like) and which to AdamW.

Muon orthogonalises a matrix that maps hidden features to hidden features. Embeddings and output heads are matrices by
shape only (their rows are independent vectors), so the rule needs names besides shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

DEFAULT_ADAMW_NAMES = (
    r"embed|(^|[._])emb([._]|$)"  # embedding, tok_embeddings, pos_emb
    r"|(^|\.)(wte|wpe|lm_head|head|unembed|classifier)(\.|$)|(^|\.)output(\.weight)?$"
    # of transformers: heads of classifiers and of BERT, the embedding of T5 and BART, T5's biases of distances
    r"|(^|\.)(score|decoder|shared)\.weight$|relative_attention_bias"
    r"|bias(es)?$|norm[^.]*(\.[^.]*)?$"  # stacked biases and norm scales of experts and heads are matrices by shape
)
"""Searched in the dotted parameter name; a match sends the parameter to AdamW."""


def is_matrix(shape: Sequence[int]) -> bool:
    """Tell whether ``shape`` is a matrix (rows, columns) or a stack of matrices (experts, rows, columns)."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 1


def algorithm_for(
    name: str | None, shape: Sequence[int], adamw_names: re.Pattern[str] | None, matrix: str = "muon"
) -> str | None:
    """Return who updates a parameter; ``None`` where the shape is a matrix and there is no name to tell its role.

    ======================================================  ==========
    parameter                                               goes to
    ======================================================  ==========
    fewer than 2 or more than 3 dimensions                  adamw
    a single row or column (a vector kept as a matrix)      adamw
    name matches ``adamw_names``                            adamw
    any other 2-D weight                                    ``matrix``
    any other 3-D weight (experts, out, in): per matrix     ``matrix``
    ======================================================  ==========

    Without a pattern the shape alone decides.
    """
    if not is_matrix(shape):
        return "adamw"
    if adamw_names is None:
        return matrix
    if name is None:
        return None
    return "adamw" if adamw_names.search(name) else matrix


@dataclass
class Split:
    """Parameters by algorithm, in the order given, with the options that explicit groups carried.

    Attributes:
        matrix: name of the algorithm for matrices; the other is ``"adamw"``.
    """

    matrix: str = "muon"
    members: dict[str, list[tuple[str | None, Tensor]]] = field(init=False)
    options: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.members = {algorithm: [] for algorithm in self.algorithms}
        self.options = {algorithm: {} for algorithm in self.algorithms}

    @property
    def algorithms(self) -> tuple[str, str]:
        """The two algorithms in the order of their groups."""
        return self.matrix, "adamw"

    def param_group(self, algorithm: str) -> dict[str, Any]:
        """Return the ``params`` and ``param_names`` entries of one torch parameter group."""
        group: dict[str, Any] = {"params": [tensor for _, tensor in self.members[algorithm]]}
        names = [name for name, _ in self.all_members()]
        if None not in names:  # torch wants names on every group or on none
            group["param_names"] = [name for name, _ in self.members[algorithm]]
        return group

    def all_members(self) -> list[tuple[str | None, Tensor]]:
        """Return every (name, parameter), the matrices first."""
        return [member for algorithm in self.algorithms for member in self.members[algorithm]]


def split_parameters(
    params: Iterable[Any], adamw_names: re.Pattern[str] | None, problems: list[str], matrix: str = "muon"
) -> Split:
    """Sort tensors, (name, tensor) pairs or groups of these by algorithm; what is wrong goes to ``problems``."""
    split = Split(matrix)
    undecided: list[Tensor] = []
    entries = [params] if isinstance(params, (Tensor, Mapping)) else list(params)
    loose = [entry for entry in entries if not isinstance(entry, Mapping)]
    for group in [{"params": loose}, *(entry for entry in entries if isinstance(entry, Mapping))]:
        algorithm = _explicit_algorithm(group, split, problems)
        for name, tensor in _named(group, problems):
            chosen = algorithm or algorithm_for(name, tensor.shape, adamw_names, matrix)
            if chosen is None:
                undecided.append(tensor)
            else:
                split.members[chosen].append((name, tensor))
    problems += _undecided_problem(undecided, matrix)
    if not undecided:
        _check_names(split, problems)
    _check_matrices(split, problems)
    return split


def _explicit_algorithm(group: Mapping[str, Any], split: Split, problems: list[str]) -> str | None:
    """Return the algorithm that the group asks for, if any, and keep the options that it sets for it."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "algorithm")}
    algorithm: str | None = group.get("algorithm")
    if algorithm is not None and algorithm not in split.algorithms:
        problems.append(f"a group's algorithm must be one of {', '.join(split.algorithms)}, got {algorithm!r}")
        return "adamw"  # any: the problem is reported
    if algorithm is None:
        if options:
            problems.append(f"a group that sets {sorted(options)} must also say algorithm='{split.matrix}' or 'adamw'")
        return None
    known = split.options[algorithm]
    for key, value in options.items():
        if known.setdefault(key, value) != value:
            problems.append(
                f"groups with algorithm={algorithm!r} disagree on {key} ({known[key]!r} and {value!r}): each algorithm "
                "keeps exactly one group, so that every pipeline stage shows schedulers the same groups"
            )
    return algorithm


def _named(group: Mapping[str, Any], problems: list[str]) -> list[tuple[str | None, Tensor]]:
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    if "param_names" in group:  # the form that torch keeps in `param_groups`
        params = list(zip(group["param_names"], params))
    members: list[tuple[str | None, Tensor]] = []
    for entry in params:
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if isinstance(tensor, Tensor):
            members.append((name, tensor))
        else:
            problems.append(f"expected tensors, (name, tensor) pairs or parameter groups, got {type(tensor).__name__}")
    return members


def _undecided_problem(undecided: list[Tensor], matrix: str) -> list[str]:
    if not undecided:
        return []
    return [
        f"{len(undecided)} parameter(s) without a name, the first of shape {tuple(undecided[0].shape)}, could be "
        "hidden matrices, embeddings or heads: pass module.named_parameters() instead of module.parameters() "
        "(LightningCLI's own `--optimizer` passes the latter: give the module an argument `optimizer: "
        f"OptimizerCallable`), or groups [{{'params': [...], 'algorithm': '{matrix}'}}, {{..., 'algorithm': 'adamw'}}]"
    ]


def _check_names(split: Split, problems: list[str]) -> None:
    members = split.all_members()
    if not members and not problems:
        problems.append("there are no parameters: was the generator already used up?")
    unnamed = [name is None for name, _ in members]
    if any(unnamed) and not all(unnamed):
        problems.append("some parameters have names and some do not: name all of them or none")
    if len({tensor for _, tensor in members}) != len(members):
        problems.append("a parameter is given more than once; pass tied weights once")


def _check_matrices(split: Split, problems: list[str]) -> None:
    for name, tensor in split.members[split.matrix]:
        label = name or "a parameter"
        needs = f"algorithm={split.matrix!r} needs"
        if tensor.ndim not in (2, 3):
            problems.append(f"{needs} 2-D or 3-D weights, but {label} has shape {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            problems.append(f"{needs} real floating point weights, but {label} is {tensor.dtype}")
