"""One stage's part of the whole model's optimizer, which steps at an engine's updates.

All stages have the same parameter groups and options, and number parameters as in the whole model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.engine import StageEngine
from lightning_asyncpp.core.updates.update import HyperParameters, StepInput
from lightning_asyncpp.errors import ConfigurationError

OptimizerStep = Callable[[StepInput], None]
_PARAMETERS = ("params", "param_names")
_PLAIN = frozenset({type(None), bool, int, float, str})  # immutable values
_NOTHING = nullcontext()


class StageOptimizer:
    """Optimizer of one stage.

    From :meth:`keep_own` on, the optimizer's groups hold the stage's parameters only. If all stages are in one process,
    they do so only during a step, a save or a load. The lists of parameters are changed in place, because schedulers
    and wrapping optimizers share them.

    Args:
        optimizer: optimizer of the whole model.
        own: parameters of the stage.
        saved_by_others: parameters of the stage that another stage shares and saves.
    """

    def __init__(self, optimizer: Optimizer, own: Collection[Tensor], saved_by_others: Collection[Tensor] = ()) -> None:
        self.optimizer = optimizer
        here, other = {id(p) for p in own}, {id(p) for p in saved_by_others}
        self._whole = [_members(group) for group in optimizer.param_groups]
        numbered = list(enumerate(p for group in self._whole for p in group["params"]))
        self._numbers = [number for number, p in numbered if id(p) in here]
        self._saved = {number for number, p in numbered if id(p) in here and id(p) not in other}
        self._own = [
            {key: [m for m, p in zip(members, group["params"]) if id(p) in here] for key, members in group.items()}
            for group in self._whole
        ]
        self._kept = False
        self._of_step: list[dict[str, Any]] = [{} for _ in self._whole]  # options that steps have changed
        self._of_stages: list[StageOptimizer] = []

    def for_stage(self, own: Collection[Tensor]) -> StageOptimizer:
        """Return the optimizer of one of several stages; a load also forgets what its steps changed."""
        self._of_stages.append(StageOptimizer(self.optimizer, own))
        return self._of_stages[-1]

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of the stage that are optimized."""
        return [p for group in self._own for p in group["params"]]

    def keep_own(self) -> None:
        """Reduce the optimizer's groups and state to the stage's parameters until :meth:`release`."""
        own = {id(p) for p in self.parameters}
        for parameter in [p for group in self._whole for p in group["params"] if id(p) not in own]:
            self.optimizer.state.pop(parameter, None)
        self._put(self._own)
        self._kept = True

    def release(self) -> None:
        """Restore the whole model's parameters in the groups."""
        if self._kept:
            self._put(self._whole)
            self._kept = False

    def hyper_parameters(self) -> HyperParameters:
        """Return a copy of the present hyper-parameters of all groups."""
        return [_options(group) for group in self.optimizer.param_groups]

    def step(self, hyper_parameters: HyperParameters, step: Callable[[], Any]) -> None:
        """Call ``step`` with earlier hyper-parameters, then restore the present ones.

        Some optimizers keep state in their groups, such as a step count or a running maximum. Once the optimizer's step
        has changed an option, this option is treated as its state, and later calls do not overwrite it. What ``step``
        sets before that, as a hook does, stays unless the option was set since ``hyper_parameters``.

        Args:
            hyper_parameters: earlier result of :meth:`hyper_parameters`.
            step: function that steps the optimizer.
        """
        with _NOTHING if self._kept else self._installed():
            groups, kept = self.optimizer.param_groups, []
            for group, earlier, of_step in zip(groups, hyper_parameters, self._of_step):
                # Options that were added after `earlier` was copied, for instance by another stage's step.
                later = {
                    key: group.pop(key) for key in group.keys() - earlier.keys() - of_step.keys() - set(_PARAMETERS)
                }
                present = {key: value for key, value in group.items() if key not in _PARAMETERS}
                set_to = {key: earlier[key] for key in present if key in earlier and key not in of_step}
                group.update(_copies(set_to))
                kept.append((group, present, set_to, of_step, later))
            before: list[dict[str, Any]] = []
            hook = self.optimizer.register_step_pre_hook(lambda *_: before.extend(map(_options, groups)))
            step()
            hook.remove()
            for (group, present, set_to, of_step, later), options in zip(kept, before or map(_options, groups)):
                for key in group.keys() - set(_PARAMETERS):
                    value, given = group[key], set_to.get(key)
                    is_same = key in options and (value is options[key] or _equal(value, options[key]))
                    if key in of_step or not is_same:
                        of_step[key] = value
                    elif key in set_to and (value is given or _equal(value, given) or not _equal(present[key], given)):
                        group[key] = present[key]
                group.update({**later, **group})

    def state_dict(self) -> dict[str, Any]:
        """Return this stage's part of the state, with the whole model's parameter numbers, so that parts can be merged.

        State that belongs to no parameter is in every stage's part.
        """
        with self._installed():
            saved = self.optimizer.state_dict()
        numbers = {here: number for here, number in enumerate(self._numbers) if number in self._saved}
        groups = saved.pop("param_groups")
        return {**_renumbered(saved, numbers), "param_groups": self._whole_groups(groups)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of the whole model's state.

        Raises:
            ConfigurationError: the groups in the state have other sizes.
        """
        sizes = [len(group["params"]) for group in self._whole]
        if (found := [len(group["params"]) for group in state["param_groups"]]) != sizes:
            raise ConfigurationError(
                f"the optimizer in the checkpoint has groups of {found} parameters, but this run's has {sizes}: create"
                " the optimizer with the same parameters, or load only the weights (load_state_dict, without ckpt_path)"
            )
        here = {number: position for position, number in enumerate(self._numbers)}
        own = _renumbered({key: value for key, value in state.items() if key != "param_groups"}, here)
        groups = [
            {**_options(group), **members, "params": numbers}
            for group, members, numbers in zip(state["param_groups"], self._own, _counted(self._own))
        ]
        with self._installed():
            self.optimizer.load_state_dict({**own, "param_groups": groups})
        for of_step in itertools.chain(self._of_step, *(other._of_step for other in self._of_stages)):
            of_step.clear()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        if self._kept:
            yield
            return
        self._put(self._own)
        for group, of_step in zip(self.optimizer.param_groups, self._of_step):
            group.update(of_step)
        try:
            yield
        finally:
            self._put(self._whole)

    def _put(self, members: list[dict[str, list[Any]]]) -> None:
        for group, of_group in zip(self.optimizer.param_groups, members):
            for key, values in of_group.items():
                group[key][:] = values

    def _whole_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups with whole-model numbers; a group with only other stages' parameters has no options."""
        return [
            {**(_options(group) if own["params"] or not whole["params"] else {}), **whole, "params": numbers}
            for group, own, whole, numbers in zip(groups, self._own, self._whole, _counted(self._whole))
        ]


class AttachedOptimizer:
    """Optimizer that an engine steps with every update, until :meth:`release`.

    Args:
        stage_optimizer: optimizer of the engine's stage; before each step, an optimizer with ``set_delay``
            receives the age of the gradients.
        engine: engine that applies the updates.
        step: function that, given its input, clips the gradient and steps the optimizer; raises if the run has failed.

    Attributes:
        running_step: input of the step that is running; None if there is none.
    """

    def __init__(self, stage_optimizer: StageOptimizer, engine: StageEngine, step: OptimizerStep) -> None:
        self.stage_optimizer, self._engine, self._strategy_step = stage_optimizer, engine, step
        self.running_step: StepInput | None = None
        optimizer: Any = stage_optimizer.optimizer
        self._set_optimizer_delay: Callable[[float], None] | None = getattr(optimizer, "set_delay", None)
        engine.weights.masters_hold_weights = not hasattr(optimizer, "compute_weights")
        optimized = set(stage_optimizer.parameters)
        engine.updates.train_only([name for name, p in engine.stage.parameters.items() if p in optimized])
        engine.updates.optimizer_step = self._apply

    def release(self) -> None:
        """Detach the optimizer from the engine, since a reference cycle would keep the engine's weights alive."""
        self._engine.updates.detach()
        self.stage_optimizer.release()

    def _apply(self, step: StepInput) -> None:
        if self._set_optimizer_delay is not None:
            self._set_optimizer_delay(step.staleness)
        masters = self._engine.weights.copies_of_masters()
        self.running_step = step
        try:
            with around_step(self.stage_optimizer.optimizer, step.weights_before, masters):
                self.stage_optimizer.step(step.hyper_parameters, partial(self._strategy_step, step))
        finally:
            self.running_step = None


@contextmanager
def around_step(
    optimizer: Any, older: Mapping[nn.Parameter, Tensor] | None, masters: Mapping[nn.Parameter, Tensor] | None
) -> Iterator[None]:
    """Give an optimizer's step the weights before the step, and write the newest weight version after the step.

    Args:
        optimizer: optimizer that steps in the context.
        older: parameter -> weights before the step, from the older version; None if there is no older version. An
            optimizer with ``weights_before(weights)`` receives them, so that it need not copy the weights.
        masters: master (fp32 weight that the optimizer updates) -> tensor of the newest version; None without masters.
            An optimizer with ``compute_weights(weights)`` writes these tensors; else they are the rounded masters.
    """
    with (
        optimizer.weights_before(older) if older and hasattr(optimizer, "weights_before") else _NOTHING,
        optimizer.compute_weights(masters) if masters and hasattr(optimizer, "compute_weights") else _NOTHING,
    ):
        yield
    if masters and not hasattr(optimizer, "compute_weights"):
        with torch.no_grad():
            foreach.copy_(list(masters.values()), [parameter.detach() for parameter in masters])


def name_of(optimizer: Optimizer) -> str:
    """Return an optimizer's class name, followed by a wrapped optimizer's class name in parentheses."""
    inner, name = getattr(optimizer, "base", None), type(optimizer).__name__
    return f"{name}({name_of(inner)})" if isinstance(inner, Optimizer) else name


def in_words(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, str]:
    """Describe the parameters, the optimizer and its options; all ranks must have the same descriptions.

    Args:
        optimizer: optimizer of the whole model.
        names: parameter -> its name.

    Returns:
        Description of a quantity -> its value.
    """
    found = {f"the shape of {name}": str(tuple(parameter.shape)) for parameter, name in names.items()}
    found["the optimizer"] = name_of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        of_group = f"of the optimizer's parameter group {number}"
        found[f"the number of parameters {of_group}"] = str(len(group["params"]))
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                found[f"{key} {of_group}"] = str(value.item())
            elif type(value) in _PLAIN or (isinstance(value, tuple) and all(type(entry) in _PLAIN for entry in value)):
                found[f"{key} {of_group}"] = str(value)
    return found


def name_parameters(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Pass parameter names to the outermost optimizer with ``name_parameters``: the given or a wrapped optimizer."""
    inner: Any = optimizer
    while isinstance(inner, Optimizer):
        if callable(name := getattr(inner, "name_parameters", None)):
            name(names)
            return
        inner = getattr(inner, "base", None)


def _members(group: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: list(group[key]) for key in _PARAMETERS if key in group}


def _counted(members: Sequence[Mapping[str, list[Any]]]) -> list[list[int]]:
    """Return the numbers of the parameters of every group."""
    counter = itertools.count()
    return [list(itertools.islice(counter, len(group["params"]))) for group in members]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return _copies({key: value for key, value in group.items() if key not in _PARAMETERS})


def _renumbered(node: Mapping[Any, Any], numbers: Mapping[int, int]) -> dict[Any, Any]:
    """Return a state with renumbered parameters; entries of parameters outside of ``numbers`` are left out."""
    found: dict[Any, Any] = {}
    for key, value in node.items():
        if type(key) is not int:
            found[key] = _renumbered(value, numbers) if isinstance(value, Mapping) else value
        elif key in numbers:
            found[numbers[key]] = value
    return found


def _copies(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v if type(v) in _PLAIN else v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v)
        for k, v in options.items()
    }


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(type(a) is type(b) and a == b)
