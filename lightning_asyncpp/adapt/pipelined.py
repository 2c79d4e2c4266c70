"""``pipelined(model)``: gives a model, whoever wrote it, its ``pipeline_layers()``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_asyncpp.adapt.blocks import find_blocks
from lightning_asyncpp.adapt.contexts import without_fast_path
from lightning_asyncpp.adapt.draws import SameDraws, host_as_before
from lightning_asyncpp.adapt.examples import Call, call_of, copied, examples_of
from lightning_asyncpp.adapt.gradients import Gradients, gradients_of, other_gradient
from lightning_asyncpp.adapt.layers import PipelineLayers, with_switches
from lightning_asyncpp.adapt.modes import layers_of
from lightning_asyncpp.adapt.packing import same
from lightning_asyncpp.adapt.state import as_before, changed_by_forwards
from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.core.cut.parts import KEPT_AS
from lightning_asyncpp.core.cut.units import apply_layers, has_layers
from lightning_asyncpp.errors import ConfigurationError

Model = TypeVar("Model", bound=nn.Module)
Example = Tensor | Sequence[Any] | Mapping[str, Any]
_AN_EXAMPLE = (
    "an example is what the training calls the model with: positional arguments in a tuple, (x, mask), one tensor for a"
    " model that takes nothing else, or keyword arguments in a dictionary, {'input_ids': ids, 'labels': ids}"
)
_SMALL = 50_000_000  # parameters
_MANY = 8  # results of layers that cross a cut; a U-Net has as many as levels
_LONGEST = 400  # characters of an error that are repeated


def pipelined(model: Model, example: Example | None = None, blocks: str | Sequence[str] = ()) -> Model:
    """Let a pipeline cut a model between the blocks that its forward calls one after the other.

    Its own forward does the rest: it runs on the stages for what is before, between and after the blocks, with
    stand-ins for what is on other stages. What these parts of it need from each other is found with the example.
    Names in ``state_dict``, ``from_pretrained``, ``save_pretrained`` and calls outside of a pipeline stay the same.

    Args:
        model: a model with real weights, such as those of ``transformers``, ``timm`` and ``torchvision``; it is
            changed in place.
        example: what it is called with in the training: positional arguments in a tuple, the only one as a tensor, or
            keyword arguments in a dictionary. Models of ``transformers`` and ``timm``, and those that begin with an
            embedding, a linear layer or a convolution, do without, if what else they take is of the same shape or a
            number per sample.
        blocks: name of the ``ModuleList`` or ``Sequential`` of layers, or names of several; default: they are looked
            for.

    Returns:
        The model.

    Raises:
        ConfigurationError: it cannot be cut so, or called with the example, with what is in the way.
    """
    if has_layers(model) and (hasattr(model, "pipeline_layers") or not blocks):
        return model
    _refuse_unfit(model)
    asked = [blocks] if isinstance(blocks, str) else list(blocks)
    with looked_at(model) as own_modes, as_before(model, ("pipeline_layers", KEPT_AS)):
        args, kwargs = _working_example(model, example)
        names = find_blocks(model, *copied(args, kwargs), asked)
        changed = changed_by_forwards(model, names, args, kwargs, own_modes)
        layers = layers_of(model, names, (args, kwargs), changed)
        model.pipeline_layers = layers  # type: ignore[assignment]
        try:
            modes = (False,) if layers.programs[True] is layers.programs[False] else (False, True)
            for mode in modes:
                _check(model.train(mode), (args, kwargs), names, mode == modes[-1] and is_small(model))
        except BaseException:
            del model.pipeline_layers
            raise
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]  # which may change what a model computes
        rank_zero_info(
            f"{class_name(model)}: config.use_cache=False, as a training needs no cache of keys and values"
            " (generate() has a switch of its own)"
        )
    if (most := layers.program.most_crossing()) > _MANY:
        rank_zero_warn(
            f"{class_name(model)} puts together what its layers return in its own forward, so that up to {most} of"
            " their results cross a cut, and not one: have a layer return what later ones need of those before it, or"
            " give the model pipeline_layers()"
        )
    costs = [1.0 + operations for operations in layers.program.costs]
    model.pipeline_costs = Costs(costs)  # type: ignore[assignment]
    return model


def is_adapted(model: nn.Module) -> bool:
    """Whether its layers are those that :func:`pipelined` found."""
    return isinstance(getattr(model, "pipeline_layers", None), PipelineLayers)


def drawing_alike(model: nn.Module) -> AbstractContextManager[Any]:
    """Meanwhile a model that :func:`pipelined` has cut draws the same random numbers as a whole and in layers."""
    layers = getattr(model, "pipeline_layers", None)
    return SameDraws(model, layers.program.blocks) if isinstance(layers, PipelineLayers) else nullcontext()


def problems_of_adapting(model: nn.Module, example: Any = None, name: str = "self.model") -> list[str]:
    """Make a model that does not say where it can be cut one that does; what is in the way.

    Args:
        model: it is changed in place, unless something is in the way.
        example: a LightningModule's ``example_input_array``.
        name: how the user calls it.
    """
    if has_layers(model):
        return []
    given = example if example is None or isinstance(example, (tuple, Mapping)) else (example,)
    try:
        with _on_host(model):
            pipelined(model, given)
    except ConfigurationError as error:
        return [
            f"{name} is a {class_name(model)}, which the pipeline cannot cut by itself: {error}."
            " pipeline_layers() is a method that returns its layers in the order in which they are applied"
        ]
    return []


@contextmanager
def _on_host(model: nn.Module) -> Iterator[None]:
    """Where examples are, whatever device the user has moved the model to; it goes back afterwards."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")}
    if len(devices) != 1:
        yield
        return
    model.cpu()
    try:
        yield
    finally:
        model.to(devices.pop())


class Costs:
    """Stands as ``pipeline_costs`` in a model: floating-point operations of its layers with the example."""

    def __init__(self, costs: list[float]) -> None:
        self.costs = costs

    def __call__(self) -> list[float]:
        """They, in order."""
        return list(self.costs)


def _refuse_unfit(model: nn.Module) -> None:
    if "forward" in vars(model):
        raise ConfigurationError(
            f"forward of this {class_name(model)} was replaced in the object, and pipelined() runs that of the"
            " class: call pipelined() before anything wraps the model's forward"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigurationError(
            f"{class_name(model)} is on the meta device, and pipelined() runs it once: build it with real weights"
        )


def _working_example(model: nn.Module, example: Example | None) -> tuple[tuple, dict[str, Any]]:
    """Arguments that the model takes."""
    if example is not None:
        return _given_example(model, example)
    problems = []
    for args, kwargs in examples_of(model):
        kwargs = with_switches(model, kwargs)
        try:
            _call_once(model, args, kwargs)
            return args, kwargs
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    said = f" (tried: {problems[-1][:200]})" if problems else ""
    raise ConfigurationError(
        f"it is not known how {class_name(model)} is called{said}; give an example of its arguments, as (x, mask) or"
        " {'input_ids': ids, 'labels': ids}: in the LightningModule's example_input_array, in Fabric the strategy's, or"
        " in pipelined(model, example). Or give the model pipeline_layers()"
    )


def _given_example(model: nn.Module, example: Example) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a user's example, with which the model was called once."""
    name = class_name(model)
    if not isinstance(example, (Tensor, tuple, list, Mapping)):
        raise ConfigurationError(f"pipelined({name}): the example is of type {type(example).__name__}; {_AN_EXAMPLE}")
    args, kwargs = call_of(example)
    try:
        kwargs = with_switches(model, kwargs)
        _call_once(model, args, kwargs)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"pipelined({name}): the model cannot be called with the example {_described(example)}:"
            f" {textwrap.shorten(said, _LONGEST, placeholder=' ...')}; {_AN_EXAMPLE}"
        ) from error
    return args, kwargs


def _described(value: Any) -> str:
    """An example with dtype and shape for each tensor, and types for the rest."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_described(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_described, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


def _call_once(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    args, kwargs = copied(args, kwargs)
    with torch.no_grad():
        model(*args, **kwargs)


def is_small(model: nn.Module) -> bool:
    """Whether a call or a backward more costs little."""
    return sum(parameter.numel() for parameter in model.parameters()) <= _SMALL


def _check(model: nn.Module, call: Call, blocks: Sequence[str], with_gradients: bool) -> None:
    """Compare the layers with the model's own forward, in the mode in which the model is."""
    expected, gradients = _result(model, type(model).forward, call, blocks, with_gradients)
    found, theirs = _result(model, apply_layers, call, blocks, with_gradients)
    if not same(expected, found):
        raise ConfigurationError(
            f"{class_name(model)}, cut into layers, gives another output than its own forward: something that"
            " its layers leave behind for the code after them (router logits, attentions, hidden states that are"
            " collected) would be lost; switch that off in its configuration, or give the model pipeline_layers()"
        )
    if name := other_gradient(gradients, theirs) if gradients else "":
        raise ConfigurationError(
            f"{class_name(model)}, cut into layers, gives another gradient of {name} than its own forward:"
            " something of the code around its layers that shows in the backward alone (hooks on gradients, an"
            " autograd.Function) would be lost; move it into a layer, or give the model pipeline_layers()"
        )


def _result(
    model: nn.Module, function: Callable[..., Any], call: Call, blocks: Sequence[str], with_gradients: bool
) -> tuple[Any, Gradients]:
    """What a function of a model and arguments returns, and its gradients, if it has some; the model stays as it was.

    Args:
        model: the first argument of the function.
        function: the forward, or what applies layers.
        call: its other arguments.
        blocks: names.
        with_gradients: whether to compute them.
    """
    args, kwargs = copied(*call)
    with torch.set_grad_enabled(with_gradients), as_before(model), SameDraws(model, blocks):
        output = function(model, *args, **kwargs)
        try:
            gradients = gradients_of(model, output) if with_gradients else {}
        except Exception:  # of a model that has none in evaluation mode
            gradients = {}
        return map_tensors(lambda tensor: tensor.detach().clone(), output), gradients


@contextmanager
def looked_at(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """In evaluation mode, with the generators and the modes, which it gives, as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(), host_as_before(), torch.no_grad(), without_fast_path():
        torch.manual_seed(0)
        model.eval()
        try:
            yield modes
        finally:
            for module, mode in modes.items():
                module.training = mode
