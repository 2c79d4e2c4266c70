"""The frame of optimizers with one rule for matrices and AdamW for everything else."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.checks import invalid, raise_problems
from lightning_asyncpp.optim.split import Split, split_parameters

FUSED_DEVICES = ("cpu", "cuda")
"""Where the fused step of AdamW is known to equal the plain one."""


class MatrixAdamW(ABC, Optimizer):
    """Two parameter groups, always: matrices go by the subclass's rule, the rest by ``torch.optim.AdamW``.

    The groups have the same keys on every pipeline stage, also where one is empty: schedulers and learning-rate
    monitors compare them. Subclasses set :attr:`matrix_algorithm` and implement :meth:`step_matrices`.

    Args:
        params: ``module.named_parameters()``, tensors or groups; see
            :func:`lightning_asyncpp.optim.split.split_parameters`.
        adamw_names: regular expression; parameters whose names match go to AdamW. None: the shape alone decides.
        matrix: hyper-parameters of the matrices' group.
        adamw: ``lr``, ``weight_decay``, ``betas`` and ``eps`` of AdamW's group; ``lr`` and ``weight_decay`` of None
            are those of the matrices.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    matrix_algorithm: ClassVar[str]
    """Name of the first group and of its ``algorithm``."""

    added_later: ClassVar[dict[str, Any]] = {}
    """Hyper-parameters of matrices that states saved before lack, with the values that stood for all then."""

    removed: ClassVar[dict[str, Any]] = {}
    """Hyper-parameters of matrices that only states saved before have, with the values that stand for all now."""

    def __init__(self, params: ParamsT, adamw_names: str | None, matrix: dict[str, Any], adamw: dict[str, Any]) -> None:
        shared = ("lr", "weight_decay")
        adamw = {**adamw, **{key: matrix[key] for key in shared if adamw[key] is None}}
        problems: list[str] = []
        pattern = _compiled(adamw_names, problems)
        entries = params if isinstance(params, (Tensor, Mapping)) else list(params) or self._stand_ins()
        split = split_parameters(entries, pattern, problems, self.matrix_algorithm)
        hyper = dict(zip(split.algorithms, (matrix, adamw)))
        groups = [_build_group(algorithm, split, hyper[algorithm], problems) for algorithm in split.algorithms]
        raise_problems(type(self).__name__, problems)
        groups[1]["fused"] = can_be_fused(groups[1]["params"]) or None
        # Only what both groups have belongs into the defaults: torch copies them into every group.
        super().__init__(groups, {key: matrix[key] for key in shared})
        self._adopt_adamw()

    def _stand_ins(self) -> list[Tensor]:
        """What torch makes of no parameters: an error, unless somebody has it take a stand-in."""
        with suppress(ValueError):
            super().__init__([], {})
            return list(self.param_groups[0]["params"])
        return []

    @abstractmethod
    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update every parameter of ``group`` that has a gradient; called without autograd."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient; return what ``closure`` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.step_matrices(self.param_groups[0])
        if self._adamw_group is not self.param_groups[1]:  # somebody assigned groups, as Lightning's callbacks do
            self._adopt_adamw()
        if self._adamw is not None:
            self._adamw.state = self.state
            with fused_where_layouts_agree(self._adamw_group, self.state):
                self._adamw.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups beyond the two."""
        if len(self.param_groups) == 2:
            raise ValueError(
                f"{type(self).__name__} keeps exactly two parameter groups: give it all parameters when it is made; "
                "those that are to be trained later are skipped as long as they have requires_grad=False"
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading a state dict, copying and unpickling all come through here, with new group dicts.
        self._drop_removed(state["param_groups"][0])
        super().__setstate__(state)
        for key, value in self.added_later.items():
            self.param_groups[0].setdefault(key, value)
        self._adopt_adamw()

    def _drop_removed(self, group: dict[str, Any]) -> None:
        for key, value in self.removed.items():
            if (saved := group.pop(key, value)) != value:
                raise ValueError(
                    f"this state of {type(self).__name__} was saved with {key}={saved!r}, which there is no more: only"
                    f" {value!r} can go on; docs/research/performance.md names the last commit that had the others"
                )

    def _adopt_adamw(self) -> None:
        # torch's own AdamW steps the second group: it works on the very group dict and on the same state, so it has
        # nothing of its own to keep in step.
        self._adamw_group = group = self.param_groups[1]
        adamw = torch.optim.AdamW([group] if group["params"] else [torch.zeros(())])
        for key, value in adamw.defaults.items():
            group.setdefault(key, value)  # an empty group looks like those of other stages
        self._adamw = adamw if group["params"] else None


def _compiled(adamw_names: str | None, problems: list[str]) -> re.Pattern[str] | None:
    if adamw_names is None:
        return None
    try:
        return re.compile(adamw_names)
    except re.error as error:
        problems.append(f"adamw_names is not a regular expression: {error}")
        return re.compile("(?!)")  # matches nothing: any will do, the problem is reported


def _build_group(algorithm: str, split: Split, hyper: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    options = split.options[algorithm]
    unknown = sorted(options.keys() - hyper.keys())
    if unknown:
        problems.append(f"a group with algorithm={algorithm!r} cannot set {unknown}; it can set {sorted(hyper)}")
    hyper = {**hyper, **options}
    if "newton_schulz_dtype" in hyper:  # kept as a string: readable in checkpoints and logs
        hyper["newton_schulz_dtype"] = str(hyper["newton_schulz_dtype"]).removeprefix("torch.")
    problems += [f"{key} ({algorithm}) {mend}, got {hyper[key]!r}" for key, mend in invalid(hyper).items()]
    return {**split.param_group(algorithm), "name": algorithm, "algorithm": algorithm, **hyper}


# -- when torch's fused AdamW may be used: one pass over memory instead of a dozen, equal to rounding ------------------


def can_be_fused(params: Iterable[Tensor]) -> bool:
    """Whether torch has a fused AdamW for such parameters; none at all count as well."""
    return all(p.is_floating_point() and p.device.type in FUSED_DEVICES for p in params)


@contextmanager
def fused_where_layouts_agree(group: dict[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
    """Take ``group["fused"]`` away for a step in which it would go wrong.

    On CPUs torch's fused step walks through memory, whatever the strides: with a gradient that is laid out unlike its
    parameter it silently pairs the wrong elements (torch 2.15).
    """
    fused = group.get("fused")
    if fused and not all(_is_contiguous(p, state) for p in group["params"] if p.grad is not None):
        group["fused"] = False
    try:
        yield
    finally:
        group["fused"] = fused


def _is_contiguous(p: Tensor, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    moments = (t for key, t in state.get(p, {}).items() if key != "step")
    return all(t.is_contiguous() for t in (p, p.grad, *moments) if t is not None)
