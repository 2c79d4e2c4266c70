"""The state of an optimizer by names of parameters, so that any stage can take up what any other one wrote.

What torch numbers by the parameters of one stage's optimizer gets their names in the model: the state of each, the
group that it is in, and tables beside them that an optimizer of its own kind keeps (number of a parameter -> value).
What is no parameter's (a count of steps) is kept for each stage that wrote it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.core.optimizers.configured import is_placeholder
from lightning_asyncpp.core.optimizers.probe import grown_options
from lightning_asyncpp.errors import ConfigurationError

BY_PARAMETER = "by_parameter"
"""Entry of such a state by which it is known; its value is the version of this form."""
_VERSION = 1
_NOT_OPTIONS = ("params", "param_names")
_BESIDE = "beside the model: "
_NOTHING = "nothing is trained: "
_Find = Callable[[Mapping[str, Any], str], Any]


def by_parameter(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], stage: int, cut: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of one stage's optimizer; those of several stages can be merged, key by key.

    Args:
        optimizer: of the stage.
        parameters: name in the model -> parameter of the stage.
        stage: its index.
        cut: how stages are made of the model, the same on all of them.
    """
    names = _names_of(optimizer, parameters)
    saved = optimizer.state_dict()
    state, groups = saved.pop("state"), saved.pop("param_groups")
    held = [[number for number in group["params"] if not names[number].startswith(_NOTHING)] for group in groups]
    beside = {key: saved_value for key, saved_value in state.items() if type(key) is not int}  # no parameter's
    tables: dict[str, dict[str, Any]] = {}
    rest = {**_without_tables(saved, names, "", tables), "state": beside}
    return {
        BY_PARAMETER: _VERSION,
        "state": _of_parameters({names[number]: values for number, values in state.items() if type(number) is int}),
        "group_of": {names[number]: f"{stage}.{g}" for g, numbers in enumerate(held) for number in numbers},
        "groups": {f"{stage}.{g}": _options(group) for g, group in enumerate(groups) if held[g]},
        "tables": {path: _of_parameters(table) for path, table in tables.items()},
        "rest": {str(stage): rest},
        "cut": dict(cut),
    }


def load_by_parameter(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    cut: Mapping[str, Any],
    saved: Mapping[str, Any],
    find: _Find,
) -> None:
    """Load the state of this stage's parameters.

    If the stages that wrote it differ in what is no parameter's (a fresh last stage has no corrections that count
    steps), and the model is cut in another way now, all stages begin anew with that, by ``optimizer.begin_anew()``, as
    after a change of the delay: so what comes of it does not depend on the new cut.

    Args:
        optimizer: of this stage.
        parameters: name in the model -> parameter of the stage.
        cut: how stages are made of the model now.
        saved: what :func:`by_parameter` gave, merged over all stages.
        find: (mapping by names, a name) -> its value under that name or another one of the same parameter, or None.

    Raises:
        ConfigurationError: the optimizer has other parameters or groups than the one that was saved.
    """
    names = _names_of(optimizer, parameters)
    group_of = _found_groups(optimizer, names, lambda name: find(saved["group_of"], name), saved["groups"])
    if problems := _problems(optimizer, names, group_of, saved):
        raise ConfigurationError.from_problems(problems)
    begins_anew = saved["cut"] != cut and not _all_equal(list(saved["rest"].values()))
    if begins_anew and not callable(getattr(optimizer, "begin_anew", None)):
        raise ConfigurationError(
            f"the state of {type(optimizer).__name__} differs from stage to stage in what belongs to no parameter, and"
            f" the checkpoint was written with {_in_words(saved['cut'])}, this run has {_in_words(cut)}: use the same"
        )
    sources = [str(group).partition(".")[0] for group in group_of.values() if group is not None]
    rests = [saved["rest"][source] for source in sources[:1]] or list(saved["rest"].values())[:1]
    state: dict[str, Any] = copy.deepcopy(rests[0]) if rests else {}
    for path, table in saved["tables"].items():
        _put(state, path.split("/"), _numbered(table, names, find))
    state["state"] = {**state.get("state", {}), **_numbered(saved["state"], names, find)}
    state["param_groups"] = _groups(optimizer, names, group_of, saved["groups"])
    optimizer.load_state_dict(_copied(state))
    if begins_anew:
        optimizer.begin_anew()  # type: ignore[attr-defined]
        rank_zero_info(
            f"{type(optimizer).__name__} begins anew: the checkpoint was written with {_in_words(saved['cut'])}, this"
            f" run has {_in_words(cut)}, and it knew more on some stages than on others"
        )


def keep_states_once(saved: Mapping[str, Any], names: Sequence[str]) -> None:
    """Leave out the state of a shared parameter under its later names where it equals that under the first one.

    Args:
        saved: what :func:`by_parameter` gave, merged over all stages; it is changed in place.
        names: of the parameter.
    """
    first, *others = names
    for table in (saved["state"], *saved["tables"].values()):
        for other in others:
            if first in table and other in table and _equal(table[first], table[other]):
                del table[other]


def _names_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the optimizer's parameters, in the order in which its state numbers them.

    Frozen ones beside the model, which every stage has, get numbers of their own.
    """
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    beside = itertools.count()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = (_NOTHING if is_placeholder(p) else _BESIDE for p in held)
    return [name_of[id(p)] if id(p) in name_of else f"{kind}{next(beside)}" for p, kind in zip(held, kinds)]


def _of_parameters(table: Mapping[str, Any]) -> dict[str, Any]:
    """Without what stands for nothing."""
    return {name: value for name, value in table.items() if not name.startswith(_NOTHING)}


def _found_groups(
    optimizer: Optimizer, names: Sequence[str], find: Callable[[str], Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Saved group of each name; of what is beside the model, of which another cut may have more, that of its group.

    Where a stage trains nothing, the group at the same place elsewhere.
    """
    found, numbered = {name: find(name) for name in names}, iter(names)
    for number, group in enumerate(optimizer.param_groups):
        own = list(itertools.islice(numbered, len(group["params"])))
        known = next((found[name] for name in own if found[name] is not None), None)
        found |= {name: known for name in own if found[name] is None and name.startswith(_BESIDE)}
        found |= {name: _same_place(number, saved) for name in own if name.startswith(_NOTHING)}
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _without_tables(node: Any, names: list[str], path: str, tables: dict[str, dict[str, Any]]) -> Any:
    """Move every dictionary that is keyed by numbers of parameters to ``tables``, an empty one put in its place."""
    if not isinstance(node, Mapping):
        return node
    if node and all(type(key) is int and 0 <= key < len(names) for key in node):
        tables[path] = {names[number]: value for number, value in node.items()}
        return {}
    return {
        key: _without_tables(value, names, f"{path}/{key}" if path else str(key), tables) for key, value in node.items()
    }


def _problems(
    optimizer: Optimizer, names: Iterable[str], group_of: Mapping[str, str | None], saved: Mapping[str, Any]
) -> list[str]:
    problems = []
    if missing := [name for name in names if group_of[name] is None and not name.startswith(_NOTHING)]:
        problems.append(
            f"the checkpoint's optimizer did not hold {', '.join(missing[:5])}: give the optimizer the parameters that"
            " it had when the checkpoint was written, or load only the weights: pass the model loaded with"
            " load_state_dict, without ckpt_path"
        )
        return problems
    position, taken = iter(names), dict[str, int]()
    for number, group in enumerate(optimizer.param_groups):
        sources = {source for _ in group["params"] if (source := group_of[next(position)]) is not None}
        options = [saved["groups"][source] for source in sources]
        if any(not _equal(options[0], other) for other in options[1:]):
            problems.append(
                f"parameter group {number} of the optimizer joins parameters that were in groups with different options"
                " when the checkpoint was written: make the same groups"
            )
        if others := {taken.setdefault(source, number) for source in sources} - {number}:
            problems.append(
                f"parameter groups {min(others)} and {number} of the optimizer divide parameters that were in one group"
                " when the checkpoint was written, whose options both would get: make the same groups"
            )
        problems += _problems_of_options(optimizer, group, options)
    return list(dict.fromkeys(problems))


def _problems_of_options(
    optimizer: Optimizer, group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A newer version of torch may have more options of the same optimizer, or fewer; another optimizer has others."""
    own, before = set(_options(group)), set(saved[0]) if saved else set()
    lacking, unknown = sorted(own - before), sorted(before - own)
    if not saved or not lacking or not unknown or not (unknown := sorted(set(unknown) - grown_options(optimizer))):
        return []
    return [
        f"the checkpoint was written with another optimizer: it has {', '.join(unknown)}, and not the"
        f" {', '.join(lacking)} of {type(optimizer).__name__}; use the same, or load only the weights: load_state_dict"
        " of the model, without ckpt_path, or in Fabric without the optimizer in the state"
    ]


def _groups(
    optimizer: Optimizer, names: list[str], group_of: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The groups as ``load_state_dict`` wants them, with the options that their parameters had."""
    groups, first = [], 0
    for number, group in enumerate(optimizer.param_groups):
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        source = group_of[names[numbers[0]]] if numbers else _same_place(number, saved)
        options = saved[source] if source is not None else {}
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append({**own, **options, "params": numbers})
    return groups


def _same_place(number: int, saved: Mapping[str, Any]) -> str | None:
    """A group at the same place on some stage, for one that is empty here."""
    return next((name for name in saved if name.partition(".")[2] == str(number)), None)


def _numbered(table: Mapping[str, Any], names: list[str], find: _Find) -> dict[int, Any]:
    found = ((number, find(table, name)) for number, name in enumerate(names))
    return {number: value for number, value in found if value is not None}


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _all_equal(values: Sequence[Any]) -> bool:
    return all(_equal(values[0], other) for other in values[1:])


def _in_words(cut: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in cut.items())


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_equal, first, second))
    return type(first) is type(second) and bool(first == second)


def _copied(tree: Any) -> Any:
    """A copy whose tensors are nobody else's: optimizers keep what they load, and write into it."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    return type(tree)(map(_copied, tree)) if type(tree) in (list, tuple) else tree
