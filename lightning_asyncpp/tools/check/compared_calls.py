"""A model's own forward, and its layers applied one after the other: are they the same?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lightning_asyncpp.adapt import drawing_alike, is_adapted
from lightning_asyncpp.adapt.differences import difference_of, kind_of
from lightning_asyncpp.adapt.gradients import gradients_of, other_gradient
from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.step.own_gradients import named_arguments
from lightning_asyncpp.errors import ConfigurationError

_OF_FORWARD = (
    "A pipeline runs the layers alone, so forward() of {} must do nothing before, between and after them: move what it"
    " does into a layer, or into the function that pipeline_layers() pairs with one; `return"
    " lightning_asyncpp.apply_layers(self, ...)` is a forward() that fits. Random numbers must be torch's, and be drawn"
    " in layers"
)
_OF_LAYERS = (
    "Each layer takes what the one before it returned, the first one the arguments of the model: pair it with a"
    " function in pipeline_layers() that hands over what it needs"
)
_OF_ADAPTED = (
    "lightning_asyncpp.pipelined() found these layers with an example, and with this batch forward() does something"
    " else: give it one like the batches, `self.model = lightning_asyncpp.pipelined(model, example={'input_ids': ids,"
    " ...})`, with all arguments of the step's call, and what is special in them (padding, masks, labels). If that does"
    " not help, switch off in the model's config what collects something from its layers (router logits, hidden states,"
    " attentions), name other lists to cut between with blocks=[...], or give the model pipeline_layers()"
)


def compare_calls(
    network: nn.Module, args: tuple, kwargs: dict[str, Any], seed: int, name: str, micro_batch: str = "a micro-batch"
) -> str:
    """Call a model, and apply its layers in order, on copies; outputs and gradients are compared.

    Layers of several parts may draw their random numbers in another order than the model's own forward, or more of
    them: such a model is compared without, or if pipelined() found its layers with the same numbers for every draw.

    Args:
        network: the model.
        args: of the call.
        kwargs: of the call.
        seed: both run under generators seeded with it.
        name: how the user calls the model.
        micro_batch: which one it is called with, for messages.

    Returns:
        What was found, as text, of whatever was compared.

    Raises:
        ConfigurationError: a layer cannot take what the one before returned, or the outputs differ.
    """
    without_dropout = not is_adapted(network) and any(unit.members is not None for unit in pipeline_units(network))
    call = _copied_call(network, args, kwargs, name)
    if without_dropout:
        call[0].eval()
    with torch.random.fork_rng(), torch.enable_grad(), collecting():
        twin = copy.deepcopy(call)
        with drawing_alike(twin[0]):
            whole = _called(twin, seed)
        with drawing_alike(call[0]):
            in_order = _applied(call, seed)
    difference = difference_of(whole, in_order) or _difference_of_gradients(twin[0], whole, call[0], in_order)
    if difference:
        raise ConfigurationError(
            f"{name}(...) and its layers, applied one after the other, are not the same with {micro_batch}:"
            f" {difference}."
            f" {_OF_ADAPTED if is_adapted(network) else _OF_FORWARD.format(type(network).__name__)}"
        )
    mode = " (in eval mode)" if without_dropout else ""
    return f"applied in order they give what {name}(...) gives{mode}"


def _copied_call(
    network: nn.Module, args: tuple, kwargs: dict[str, Any], name: str
) -> tuple[nn.Module, tuple, dict[str, Any]]:
    """Copies of a model and its arguments, of which nothing is differentiated.

    Raises:
        ConfigurationError: an argument cannot be copied.
    """
    memo: dict[int, Any] = {}
    network, copies = copy.deepcopy(network, memo), []
    for argument, value in named_arguments(args, kwargs):
        try:
            value = map_tensors(lambda t: t if t.is_leaf else t.detach(), value)
            copies.append(copy.deepcopy(value, memo))
        except Exception as error:
            raise ConfigurationError(
                f"an argument of {name}(...), {argument}, is a {type(value).__name__} that cannot be copied, as a check"
                f" must ({type(error).__name__}: {error}): call the model with tensors in tuples, lists and"
                " dictionaries"
            ) from error
    return network, tuple(copies[: len(args)]), dict(zip(kwargs, copies[len(args) :]))


def _called(call: tuple[nn.Module, tuple, dict[str, Any]], seed: int) -> Any:
    network, args, kwargs = call
    torch.manual_seed(seed)
    return network.forward(*args, **kwargs)  # a pipeline runs hooks of the whole model around its layers


def _applied(call: tuple[nn.Module, tuple, dict[str, Any]], seed: int) -> Any:
    network, args, kwargs = call
    torch.manual_seed(seed)
    before = "the arguments of the model"
    for unit in pipeline_units(network):
        try:
            output = unit.apply(args, kwargs)
        except ConfigurationError:
            raise  # of pipelined(): it says what to do
        except Exception as error:
            raise ConfigurationError(
                f"layer {unit.name!r} ({type(unit.module).__name__}) cannot take {before}, {_kinds(args, kwargs)}:"
                f" {type(error).__name__}: {error}. {_OF_ADAPTED if is_adapted(network) else _OF_LAYERS}"
            ) from error
        args, kwargs, before = (output,), {}, f"what layer {unit.name!r} returned"
    return args[0]


def _difference_of_gradients(twin: nn.Module, whole: Any, network: nn.Module, in_order: Any) -> str:
    try:
        with drawing_alike(twin):
            expected = gradients_of(twin, whole)
    except Exception:  # the training will say so
        return ""
    with drawing_alike(network):
        name = other_gradient(expected, gradients_of(network, in_order))
    return f"their gradients of {name} differ" if name else ""


def _kinds(args: tuple, kwargs: dict[str, Any]) -> str:
    return "(" + ", ".join([*map(kind_of, args), *(f"{name}={kind_of(value)}" for name, value in kwargs.items())]) + ")"
