"""A small copy of an optimizer, to try out what its step does without touching the weights that it trains."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LONGEST_SIDE = 4
_ALIKE = 4  # parameters of one kind that are kept: further ones would be treated as these are
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
          "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
          "_optimizer_load_state_dict_post_hooks")  # fmt: skip
Kind = tuple[int, tuple[int, ...], torch.dtype]


class NotExaminedError(Exception):
    """An optimizer cannot be copied, or its copy cannot take a step."""


class SmallCopy:
    """A copy of an optimizer over stand-ins: tensors of at most four elements per side in place of its parameters.

    What it holds is copied, other optimizers in it as well, with everything cut to the same size. Of parameters of one
    group and shape four are kept; a group with a single trained one gets a twin of it, so that a rule over the whole
    group shows.

    Args:
        optimizer: it is only read.

    Attributes:
        optimizer: the copy.
        trained: its parameters that require a gradient, each with its kind: group, small shape and dtype.
        names: stand-in -> the parameter's number in the groups of ``optimizer``, of those that were there.

    Raises:
        NotExaminedError: it holds what cannot be copied, such as a function of the user's over its parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._memo: dict[int, Any] = {}
        self._family: list[tuple[Optimizer, Optimizer]] = []
        try:
            self._make_stand_ins(optimizer)
            for original, new in self._family:
                vars(new).update(copy.deepcopy(_contents(original), self._memo))
        except NotExaminedError:
            raise
        except Exception as error:
            raise NotExaminedError(f"it cannot be copied ({type(error).__name__}: {error})") from error
        self.optimizer: Optimizer = self._memo[id(optimizer)]
        self._keep_few_alike()
        self._add_twins()
        groups = enumerate(self.optimizer.param_groups)
        self.trained: list[tuple[Tensor, Kind]] = [
            (p, (index, tuple(p.shape), p.dtype)) for index, group in groups for p in group["params"] if p.requires_grad
        ]

    def let_train(self) -> None:
        """Put an optimizer that has a mode for training, as schedule-free ones have, into it."""
        if callable(train := getattr(self.optimizer, "train", None)):
            with contextlib.suppress(Exception):  # a wrapper of what has no such mode
                train()

    def remove(self, parameters: list[Tensor]) -> None:
        """Take parameters out of the groups, as on a stage that does not hold them."""
        gone = {id(p) for p in parameters}
        for held in self._lists_of_parameters():
            held[:] = [p for p in held if id(p) not in gone]

    def _make_stand_ins(self, optimizer: Optimizer) -> None:
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._family.append((optimizer, _shell(optimizer, self._memo)))
        for found in _reachable(_contents(optimizer)):
            if isinstance(found, Optimizer):
                self._family.append((found, _shell(found, self._memo)))
                parameters |= {id(p) for group in found.param_groups for p in group["params"]}
        for original, _ in list(self._family):
            for found in _reachable(_contents(original)):
                if isinstance(found, Tensor) and id(found) not in self._memo:
                    is_weight = id(found) in parameters or isinstance(found, nn.Parameter)
                    self._memo[id(found)] = self._weight(found) if is_weight else _cut(found)

    def _weight(self, parameter: Tensor) -> Tensor:
        shape = [min(side, _LONGEST_SIDE) for side in parameter.shape]
        if parameter.is_floating_point() or parameter.is_complex():
            values = torch.randn(shape, generator=self._generator, dtype=torch.float64)
            data = values.to(parameter.dtype).to(parameter.device)
        else:
            data = _cut(parameter)
        stand_in = nn.Parameter(data, requires_grad=parameter.requires_grad)
        plain = {key: value for key, value in vars(parameter).items() if isinstance(value, (bool, int, float, str))}
        vars(stand_in).update(plain)
        return stand_in

    def _lists_of_parameters(self) -> list[list[Tensor]]:
        lists = {id(group["params"]): group["params"] for _, new in self._family for group in new.param_groups}
        return list(lists.values())

    def _keep_few_alike(self) -> None:
        for held in self._lists_of_parameters():
            counts: dict[Any, int] = {}
            for p in list(held):
                kind = (tuple(p.shape), p.dtype, p.requires_grad)
                counts[kind] = counts.get(kind, 0) + 1
                if counts[kind] > _ALIKE:
                    held[:] = [other for other in held if other is not p]
                    for _, new in self._family:
                        new.state.pop(p, None)

    def _add_twins(self) -> None:
        twins: dict[int, Tensor] = {}
        for held in self._lists_of_parameters():
            trained = [p for p in held if p.requires_grad]
            if len(trained) == 1:
                twin = twins.setdefault(id(trained[0]), self._weight(trained[0]))
                held.append(twin)
                for _, new in self._family:
                    if trained[0] in new.state and twin not in new.state:
                        new.state[twin] = copy.deepcopy(new.state[trained[0]])
        for _, new in self._family:
            for group in new.param_groups:
                if "param_names" in group:
                    group["param_names"] = [f"{group['param_names'][0]}.{i}" for i in range(len(group["params"]))]


def _contents(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes of an optimizer without what others hung on it: hooks, and a scheduler's count of steps.

    Raises:
        NotExaminedError: somebody put another step in place of its own.
    """
    contents = {name: value for name, value in vars(optimizer).items() if name not in _HOOKS}
    if (step := contents.pop("step", None)) is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise NotExaminedError("its step() was replaced")
    hooks = {name: vars(optimizer)[name] for name in _HOOKS if name in vars(optimizer)}
    return contents | {name: OrderedDict(_without_memory(hooks[name])) for name in hooks}


def _without_memory(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Hooks that know nothing but what they are given: calling them leaves no trace elsewhere."""
    return {key: hook for key, hook in hooks.items() if not has_memory(hook)}


def has_memory(hook: Any) -> bool:
    """Whether a hook knows more than what it is given."""
    return not isinstance(hook, FunctionType) or bool(hook.__closure__)


def step_hooks(optimizer: Optimizer, before: bool = False) -> list[Any]:
    """What is called around each step, or only before it."""
    return [hook for name in _HOOKS[: 1 if before else 2] for hook in vars(optimizer).get(name, {}).values()]


def _shell(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    shell: Optimizer = memo.setdefault(id(optimizer), type(optimizer).__new__(type(optimizer)))
    return shell


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach()[tuple(slice(_LONGEST_SIDE) for _ in tensor.shape)].clone()


def _reachable(root: Any) -> Iterator[Any]:
    """Tensors and optimizers in nested containers and objects; what is inside an optimizer counts, too."""
    seen, waiting = set[int](), [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or node is None or isinstance(node, (str, bytes, int, float, type, ModuleType)):
            continue
        seen.add(id(node))
        if isinstance(node, nn.Module):
            raise NotExaminedError(f"it holds a {type(node).__name__}")
        if isinstance(node, Tensor):
            yield node
            continue
        if isinstance(node, Optimizer):
            yield node
        waiting += _children(node)


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return [*node.keys(), *node.values()]
    if isinstance(node, (list, tuple, set, frozenset)):
        return list(node)
    if isinstance(node, MethodType):
        return [node.__self__]
    if isinstance(node, FunctionType):
        captured = [cell.cell_contents for cell in node.__closure__ or ()]
        if any(True for _ in _reachable(captured)):
            raise NotExaminedError(f"it calls {node.__qualname__}, which holds tensors of its own")
        return []
    if isinstance(node, Optimizer):
        return list(_contents(node).values())
    if hasattr(node, "func") and hasattr(node, "args") and hasattr(node, "keywords"):  # functools.partial
        return [node.func, node.args, node.keywords]
    return list(vars(node).values()) if hasattr(node, "__dict__") else []
