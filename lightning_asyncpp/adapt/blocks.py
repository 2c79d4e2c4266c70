"""Search for the blocks of a model: the members of its lists of layers that a forward calls in order.

Without such a list, the outermost submodules with weights are the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.runs import Call, copied, untouched
from lightning_asyncpp.core.cut.network import class_name
from lightning_asyncpp.core.tree import tensors_of
from lightning_asyncpp.errors import ConfigurationError


class _Calls:
    """Calls in a forward: names of modules in order, and the input and output tensors of each."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}


def find_blocks(model: nn.Module, call: Call, asked: Sequence[str] = ()) -> list[str]:
    """Return the names of the blocks, in the order of their calls.

    Args:
        model: model, which is run once.
        call: arguments of an example.
        asked: names of the lists of blocks; default: search for them.

    Raises:
        ConfigurationError: no blocks were found, or a name in ``asked`` is not that of a list of layers.
    """
    calls = _recorded(model, call)
    lists = {name: m for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    if unknown := [name for name in asked if name not in lists]:
        raise ConfigurationError(
            f"blocks={unknown}: the model has no such ModuleList or Sequential; it has {list(lists)}"
        )
    members = {name: [f"{name}.{key}" for key, _ in layers.named_children()] for name, layers in lists.items()}
    chosen = [name for name in asked or lists if _in_turn(members[name], calls)]
    if not asked:
        alike = [name for name in chosen if _of_a_kind(lists[name])]
        inner = {name for name in alike if any(name.startswith(f"{other}.") for other in alike)}
        cuttable = {name for name in inner if _of_a_kind(lists[name], nested=True)}
        chosen = [n for n in alike if n not in inner or (n in cuttable and _follow_each_other(members[n], calls))]
    names = [member for name in chosen for member in members[name] if member in calls.inputs]
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]  # keep the innermost
    names = names or ([] if asked else _submodules(model, calls))
    if not names:
        raise ConfigurationError(
            f"no layers were found in {class_name(model)}: it needs a ModuleList or Sequential with at least two layers"
            " of one class, each called once, in order; or else submodules that are called once each and have most of"
            f" the weights. Name lists with pipelined(..., blocks=[...]) (the model has {list(lists)}), or give the"
            " model pipeline_layers()"
        )
    return sorted(names, key=calls.order.index)


def _recorded(model: nn.Module, call: Call) -> _Calls:
    calls = _Calls()

    def enter(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.order.append(name)
        calls.inputs[name] = list(tensors_of((args, kwargs)))

    def leave(name: str, output: Any) -> None:
        calls.outputs[name] = list(tensors_of(output))

    args, kwargs = copied(*call)
    with ExitStack() as hooks, untouched(model), torch.no_grad():
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(lambda _, *a, name=name: enter(name, *a), with_kwargs=True)
            behind = module.register_forward_hook(lambda _, __, output, name=name: leave(name, output))
            hooks.callback(before.remove)
            hooks.callback(behind.remove)
        model(*args, **kwargs)
    return calls


def _in_turn(names: Sequence[str], calls: _Calls) -> bool:
    """Return whether at least two of a list's layers were called, each once and in order."""
    called = [name for name in names if name in calls.inputs]
    members = set(names)
    return len(called) > 1 and called == [name for name in calls.order if name in members]


def _of_a_kind(layers: nn.Module, nested: bool = False) -> bool:
    """Return whether at least two layers with children have the same class; if ``nested``, ignore ``nn.Sequential``."""
    kinds = Counter(
        type(child)
        for child in layers.children()
        if next(child.children(), None) is not None and not (nested and isinstance(child, nn.Sequential))
    )
    return max(kinds.values(), default=0) > 1


def _follow_each_other(names: Sequence[str], calls: _Calls) -> bool:
    """Return whether each layer takes a tensor that its predecessor returned; parallel layers (experts) do not."""
    given, taken = ([{id(t) for t in tensors.get(n, ())} for n in names] for tensors in (calls.outputs, calls.inputs))
    return all(a & b for a, b in zip(given, taken[1:]))


def _submodules(model: nn.Module, calls: _Calls) -> list[str]:
    """Return the outermost submodules that are called once, if together they have at least half of the weights.

    Later stages replace the output of an earlier stage's block by zeros, whose shape follows from the block's
    floating-point input. So modules without such an input, such as token embeddings, are no blocks.
    """
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
    names = list(_outermost("", model, Counter(calls.order), sizes))
    enough = 2 * sum(sizes[name] for name in names) >= sizes[""]
    found = [name for name in names if any(tensor.is_floating_point() for tensor in calls.inputs[name])]
    return found if enough and len(found) > 1 else []


def _outermost(around: str, module: nn.Module, times: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the outermost submodules that are called once; in place of a very large submodule, the submodules in it."""
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
