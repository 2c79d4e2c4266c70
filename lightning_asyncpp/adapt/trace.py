"""Records one forward of a model: what its blocks took and gave, and where the parameters outside of them were used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_asyncpp.adapt.draws import SameDraws
from lightning_asyncpp.adapt.packing import Output, TensorTable, taken, template_of, tensor_numbers_in
from lightning_asyncpp.adapt.state import as_before
from lightning_asyncpp.core.batches.tree import leaves_of, map_tensors, tensors_of
from lightning_asyncpp.core.cut.module_as_network import class_name
from lightning_asyncpp.errors import ConfigurationError

_FACTS = frozenset(
    getattr(Tensor, name)
    for name in ("dtype", "shape", "device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "is_cuda")
)
_FACT_CALLS = frozenset({"size", "dim", "numel", "is_floating_point", "stride", "is_contiguous", "element_size"})


@dataclass
class Trace:
    """One forward.

    Attributes:
        blocks: names, in the order of calls.
        table: the tensors of the call and of arguments.
        call: the model's arguments, packed.
        arguments: by block, packed.
        values: the tensors of the table as they were then.
        outputs: by block and leaf; and of what blocks took that code around them had made.
        templates: of the outputs.
        alike: by block, of each leaf of its output: whether its shape is that of the block's first tensor; None of what
            is no tensor.
        uses: (parameter, gap, names of the modules around) of every use outside of blocks; gap i is before block i.
        calls: (module, gap, leaves of its output, its template), of modules outside of blocks.
        output: of the model.
        seed: of all random numbers.
        draws_on_host: whether code around the blocks drew those of Python or NumPy.
        operations: floating-point operations: of the gaps, and of the blocks.
    """

    blocks: list[str]
    table: TensorTable
    call: Any = None
    arguments: list[Any] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    outputs: dict[Output, Any] = field(default_factory=dict)
    templates: list[Any] = field(default_factory=list)
    alike: list[list[bool | None]] = field(default_factory=list)
    uses: list[tuple[nn.Parameter, int, tuple[str, ...]]] = field(default_factory=list)
    calls: list[tuple[str, int, list[Any], Any]] = field(default_factory=list)
    output: Any = None
    seed: int = 0
    draws_on_host: bool = False
    operations: tuple[list[float], list[float]] = ([], [])

    def keep_values(self) -> None:
        """Copy the tensors that the table has taken up since."""
        self.values += [tensor.detach().clone() for tensor in self.table.tensors[len(self.values) :]]


class _Recorder(TorchFunctionMode):
    """Sees every function of torch that is called, and which parameters it is given."""

    def __init__(self, model: nn.Module, trace: Trace, counter: FlopCounterMode) -> None:
        super().__init__()
        self.trace, self.counter, self.model = trace, counter, type(model).__name__
        self.parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.position = 0
        self.inside: str | None = None  # of the block that runs
        self.around: list[str] = []
        self.counted = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        is_fact = getattr(func, "__self__", None) in _FACTS or getattr(func, "__name__", "") in _FACT_CALLS
        if not is_fact:
            for value in leaves_of([list(args), kwargs or {}]):
                if id(value) in self.parameters:
                    self._used(self.parameters[id(value)])
        return func(*args, **(kwargs or {}))

    def _used(self, parameter: nn.Parameter) -> None:
        if self.inside is None:
            self.trace.uses.append((parameter, self.position, tuple(self.around)))
        elif id(parameter) not in self.held:
            raise ConfigurationError(
                f"layer {self.inside} uses a parameter that it does not hold, and that may be on another stage: name"
                " other layers to cut between with pipelined(..., blocks=[...]), or give the model pipeline_layers()"
            )

    def begin_block(self, name: str, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.trace.blocks[self.position : self.position + 1] != [name]:
            self._refuse_order()
        self._count(0)
        self.inside, self.held = name, {id(parameter) for parameter in block.parameters()}
        self.trace.arguments.append(self.trace.table.pack([list(args), kwargs], name))
        self.trace.keep_values()
        inputs = len(tensor_numbers_in(self.trace.call))
        for number, tensor in taken(args, kwargs).items():
            if tensor.is_floating_point() and self.trace.table.is_made(tensor, inputs):
                self.trace.outputs[self.position, number] = tensor.detach().clone()
        self.first = next(tensors_of([args, kwargs]), None)

    def end_block(self, output: Any) -> None:
        self._count(1)
        trace, position = self.trace, self.position
        trace.alike.append([])
        for leaf, value in enumerate(leaves_of(output)):
            is_tensor = isinstance(value, Tensor)
            trace.outputs[position, leaf] = value.detach().clone() if is_tensor else value
            alike = is_tensor and self.first is not None and value.shape == self.first.shape
            trace.alike[position].append(alike if is_tensor else None)
        trace.templates.append(template_of(output))
        trace.table.know(position, output)
        self.inside, self.position = None, position + 1

    def _count(self, kind: int) -> None:
        total = self.counter.get_total_flops()
        self.trace.operations[kind].append(float(total - self.counted))
        self.counted = total

    def finish(self) -> None:
        """The forward is over."""
        if self.position < len(self.trace.blocks):
            self._refuse_order()
        self._count(0)

    def _refuse_order(self) -> NoReturn:
        """Of evaluation mode the blocks are those that it called."""
        raise ConfigurationError(
            f"in training mode forward of {self.model} does not call the same layers in the same order as in evaluation"
            " mode, such as where it leaves some out at random: switch that off in the model's configuration"
            " (layerdrop=0), or give the model pipeline_layers()"
        )


def record(model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
    """Run a model once, without gradients, and leave it as it was.

    Args:
        model: in the mode of which the trace is to be.
        blocks: names, in the order of calls.
        args: of an example.
        kwargs: of an example.

    Raises:
        ConfigurationError: a block takes or returns what cannot cross a cut, or uses parameters of others; or others
            are called.
    """
    table = TensorTable()
    trace = Trace(list(blocks), table, operations=([], []))
    trace.call = table.pack([list(args), dict(kwargs)], class_name(model))
    trace.keep_values()
    counter = FlopCounterMode(display=False)
    recorder = _Recorder(model, trace, counter)
    inside = tuple(f"{name}." for name in blocks)
    with as_before(model), ExitStack() as hooks:
        for name, module in model.named_modules():
            if name in blocks:
                _watch_block(hooks, name, module, recorder)
            elif name and not name.startswith(inside):
                _watch_module(hooks, name, module, recorder)
        with torch.no_grad(), SameDraws(model, blocks) as drawn, counter, recorder:
            trace.output = type(model).forward(model, *args, **kwargs)
        recorder.finish()
    trace.seed, trace.draws_on_host = drawn.seed, drawn.on_host
    trace.output = map_tensors(lambda tensor: tensor.detach().clone(), trace.output)
    return trace


def _watch_block(hooks: ExitStack, name: str, module: nn.Module, recorder: _Recorder) -> None:
    def enter(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        recorder.begin_block(name, block, args, kwargs)

    def leave(_: nn.Module, args: tuple, output: Any) -> None:
        recorder.end_block(output)

    hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
    hooks.callback(module.register_forward_hook(leave).remove)


def _watch_module(hooks: ExitStack, name: str, module: nn.Module, recorder: _Recorder) -> None:
    def enter(*_: Any) -> None:
        recorder.around.append(name)

    def leave(_: nn.Module, args: tuple, output: Any) -> None:
        recorder.around.pop()
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(output)]
        recorder.trace.calls.append((name, recorder.position, leaves, template_of(output)))

    hooks.callback(module.register_forward_pre_hook(enter).remove)
    hooks.callback(module.register_forward_hook(leave).remove)
