"""Finds the blocks of a model: the members of its lists of layers, which a forward calls one after the other.

Where there is no such list, each of the outermost submodules with weights is a block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.errors import ConfigurationError

_SHOWN = 4  # lists in a message


class _Calls:
    """The calls of a forward: when each module was entered, and what it took and gave."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.inputs: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.of_numbers: set[str] = set()  # modules that take tensors of real numbers, not only tokens
        self.kept: list[Any] = []  # so that identities stay


def find_blocks(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], asked: Sequence[str] = ()
) -> list[str]:
    """Names of the blocks, in the order of their calls.

    Args:
        model: run once.
        args: of an example.
        kwargs: of an example.
        asked: names of the lists to take; by default they are looked for.

    Raises:
        ConfigurationError: there is none.
    """
    calls = _recorded(model, args, kwargs)
    lists = {name: m for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    if unknown := [name for name in asked if name not in lists]:
        raise ConfigurationError(
            f"blocks={unknown}: not a ModuleList or Sequential of the model; there are {list(lists)}"
        )
    irregular = {name: why for name in (asked or lists) if (why := _irregularity(name, lists[name], calls))}
    chosen = [name for name in (asked or lists) if name not in irregular]
    if not asked:
        chosen = [name for name in chosen if _of_a_kind(lists[name])]
        outer = {name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)}
        inner = {name for name in chosen if _of_a_kind(lists[name], nested=True)}
        inner = {name for name in inner if _follow_each_other(name, lists[name], calls)}
        chosen = [name for name in chosen if name in outer | inner]
    if not chosen and not asked and (names := _submodules(model, calls)):
        return sorted(names, key=calls.order.index)
    if not chosen:
        raise ConfigurationError(
            f"no layers were found in {class_name(model)}: a ModuleList or Sequential with two layers or more of a"
            " kind, each called once and in order, or else submodules that the forward calls once each, with most of"
            f" the weights; its lists are {list(lists)}. {_way_on(irregular, lists)}"
        )
    names = [f"{name}.{key}" for name in chosen for key, _ in lists[name].named_children()]
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]  # the inner ones
    return sorted((name for name in names if name in calls.order), key=calls.order.index)


def _submodules(model: nn.Module, calls: _Calls) -> list[str]:
    """Names of what is a block where no list is: called once, with weights, and together with most of the model's.

    What a block returns that has not run has the shape of what it takes: so an embedding of tokens is none.
    """
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
    names = list(_outermost("", model, Counter(calls.order), sizes))
    enough = 2 * sum(sizes[name] for name in names) >= sizes[""]
    found = [name for name in names if name in calls.of_numbers]
    return found if enough and len(found) > 1 else []


def _outermost(around: str, module: nn.Module, times: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[str]:
    """The outermost submodules; in place of one that has most of the weights, or a sequence of many, those in it."""
    for key, child in module.named_children():
        name = f"{around}.{key}".removeprefix(".")
        if not sizes.get(name, 0) or times.get(name, 0) > 1:
            continue
        inner = list(_outermost(name, child, times, sizes))
        is_large = (4 if isinstance(child, nn.Sequential) else 2) * sizes[name] > sizes[""]
        if not times.get(name, 0) or (is_large and inner):
            yield from inner
        else:
            yield name


def _recorded(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Calls:
    calls = _Calls()
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def enter(_: nn.Module, a: tuple, k: dict[str, Any], name: str = name) -> None:
                calls.order.append(name)
                calls.kept.append((a, k))
                calls.inputs[name] = [id(tensor) for tensor in tensors_of([a, k])]
                if any(tensor.is_floating_point() for tensor in tensors_of([a, k])):
                    calls.of_numbers.add(name)

            def leave(_: nn.Module, a: tuple, k: dict[str, Any], output: Any, name: str = name) -> None:
                calls.kept.append(output)
                calls.outputs[name] = [id(tensor) for tensor in tensors_of(output)]

            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        with torch.no_grad():
            model(*args, **kwargs)
    return calls


def _irregularity(name: str, layers: nn.Module, calls: _Calls) -> str:
    """Why a list cannot be cut between its layers as they were called; empty: each was called once, and in order.

    Layers that were not called at all are no reason, as long as two were.
    """
    times = Counter(calls.order)
    children = [f"{name}.{key}" for key, _ in layers.named_children()]
    called = [child for child in children if times[child]]
    if often := [child for child in called if times[child] > 1]:
        return f"the forward called {often[0]} {times[often[0]]} times"
    if len(called) < 2:
        return f"the forward called {len(called)} of its {len(children)} layers"
    if called != [child for child in calls.order if child in set(children)]:
        return "the forward called its layers in another order"
    return ""


def _way_on(irregular: Mapping[str, str], lists: Mapping[str, nn.Module]) -> str:
    """What to do where no list is left.

    Args:
        irregular: name of a list -> why it was left out for how it was called.
        lists: all of them.
    """
    several = [name for name in irregular if len(list(lists[name].children())) > 1]
    outermost = [name for name in several if not any(name.startswith(f"{other}.") for other in several)]
    if not outermost:
        return "Name those to cut between with pipelined(..., blocks=[...]), or give the model pipeline_layers()"
    reasons = "; ".join(f"{name}: {irregular[name]}" for name in outermost[:_SHOWN])
    more = f"; and {len(outermost) - _SHOWN} more" if len(outermost) > _SHOWN else ""
    return (
        f"Left out for how they were called with this example: {reasons}{more}. Have the forward call each layer once,"
        " whatever the data are, name other lists with pipelined(..., blocks=[...]), or give it pipeline_layers()"
    )


def _of_a_kind(layers: nn.Module, nested: bool = False) -> bool:
    """Whether at least two of its layers are made of others, and of the same class; in a block no plain sequences."""
    kinds = Counter(
        type(child)
        for child in layers.children()
        if next(child.children(), None) is not None and not (nested and isinstance(child, nn.Sequential))
    )
    return max(kinds.values(), default=0) > 1


def _follow_each_other(name: str, layers: nn.Module, calls: _Calls) -> bool:
    """Whether each layer takes a tensor that the one before it returned: experts beside each other do not."""
    children = [f"{name}.{key}" for key, _ in layers.named_children()]
    pairs = itertools.pairwise(children)
    return all(set(calls.outputs.get(a, ())) & set(calls.inputs.get(b, ())) for a, b in pairs)
