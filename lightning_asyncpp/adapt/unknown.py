"""Values that are not there: what stands for them, and who computes with it.

A stand-in holds NaN, and what is computed from NaN is NaN, so that a result which lacks a value shows it. What does not
show it is code that asks a question of the value, ``if x.max() > 1``: such code is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # its documented place

from lightning_asyncpp.adapt.draws import drawn_from, draws
from lightning_asyncpp.core.batches.tree import map_tensors, tensors_of
from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")
# Functions that take no values of a tensor, but its shape and dtype.
_OF_SHAPES = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
})  # fmt: skip
# Functions of float tensors whose results may hold no NaN, though what they take does.
_FORGETFUL = frozenset({
    "nan_to_num", "nan_to_num_", "fmax", "fmin", "nansum", "nanmedian", "copysign", "copysign_", "histc", "_unique2",
    "unique_dim", "unique_consecutive", "heaviside", "heaviside_", "sgn", "sign", "sign_", "bernoulli",
    "grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler", "multi_margin_loss", "multilabel_margin_loss_forward",
})  # fmt: skip
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})  # which torch does without running a function
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_FACTS = frozenset({Tensor.shape, Tensor.dtype, Tensor.ndim})
_FACT_CALLS = frozenset({"size", "dim", "numel", "__len__", *_OF_SHAPES})
_FACTS_OF_OTHERS = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})


class UnknownValueError(ConfigurationError):
    """Does the code around a model's layers ask for a value that is on another stage?"""


class Unknown(TorchDispatchMode):
    """Makes stand-ins, and follows what is computed from them while it is entered.

    It looks at every function that torch runs. Results of stand-ins are stand-ins; a function that would make numbers
    without NaN of them raises: one that returns whole numbers, booleans or Python's numbers, or that leaves NaN out.

    Attributes:
        device: where stand-ins are made.
        training: the model's mode.
        seed_of_draw: called before random numbers are drawn; it gives a seed for them, or None where they were drawn
            before, on another stage, and it is not known from which.
        changed: full names of attributes that every forward changes.
        asked: what those stand for that were asked for their shape or dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device, self.training = torch.device("cpu"), False
        self.asked: set[str] = set()
        self.seed_of_draw: Callable[[], int | None] | None = None
        self.changed: set[str] = set()
        self._drawn: dict[int, Any] = {}  # storages by address
        self._storages: dict[int, tuple[Any, str]] = {}  # by address; held, so that no other gets it
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}  # by identity
        self._reads = _Reads(self)

    def __enter__(self) -> Unknown:
        """Look at what is computed."""
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Look no more."""
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def forget(self) -> None:
        """The forward that they were made for is over."""
        self._storages.clear()
        self._drawn.clear()
        self._replaced.clear()
        self.asked.clear()
        self.seed_of_draw = None

    def note_fact(self, tensors: Iterable[Any]) -> None:
        """Somebody asks tensors for shape or dtype."""
        if self._storages:
            self.asked |= {what for t in tensors if isinstance(t, Tensor) and (what := self._what(t))}

    def nothing(self, what: str, shape: Sequence[int], dtype: torch.dtype, writable: bool = False) -> Tensor:
        """A stand-in of NaN (zeros of a dtype that has none).

        Args:
            what: it stands for, as ``what blocks.3 returned``.
            shape: of the value.
            dtype: of the value.
            writable: whether it may be changed in place; otherwise it takes no memory of its size.
        """
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        nothing = torch.full((), value, dtype=dtype, device=self.device).expand(tuple(shape))
        nothing = nothing.contiguous() if writable else nothing
        self._mark(nothing, what)
        return nothing

    def replace(self, tensor: Tensor, value: Tensor) -> None:
        """Have functions of torch take a known value from now on, where the model's code gives them a tensor."""
        self._replaced[id(tensor)] = tensor, value

    def replaced(self, given: Any) -> Any:
        """The same with values in the places of tensors for which they are known."""
        return map_tensors(self._known, given) if self._replaced else given

    def _known(self, tensor: Tensor) -> Tensor:
        return self._replaced[id(tensor)][1] if id(tensor) in self._replaced else tensor

    def set_aside(self, function: Callable[..., T], *args: Any) -> T:
        """Call what is no code of the model's, or a submodule, which may be compiled, without looking at it."""
        self.__exit__(None, None, None)
        try:
            return function(*args)
        finally:
            self.__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; most of them take nothing that is not known, for which it has to be quick."""
        if self.seed_of_draw is not None and draws(func, args, kwargs or {}):
            result = self._draw(func, args, kwargs or {})
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if self._drawn and (_is_among(args, self._drawn) or (kwargs and _is_among(kwargs.values(), self._drawn))):
            self._drawn |= _storages(_taken(args, kwargs) if result is None else _flat([result]))
        if _is_among(args, self._storages) or (kwargs and _is_among(kwargs.values(), self._storages)):
            self._follow(func, _taken(args, kwargs), result)
        return result

    def _draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function returns that draws random numbers: those of before, or it is noted that they are others."""
        assert self.seed_of_draw is not None
        if (seed := self.seed_of_draw()) is not None:
            return drawn_from(seed, self.device, func, args, kwargs)
        result = func(*args, **kwargs)
        self._drawn |= _storages(_taken(args, kwargs) if result is None else _flat([result]))
        return result

    def _follow(self, func: Any, taken: Sequence[Any], result: Any) -> None:
        """Have what was computed from stand-ins be one, or raise where it would not show.

        Args:
            func: a function of torch.
            taken: what it took, with a stand-in in it.
            result: what it returned.
        """
        name = func.overloadpacket.__name__
        if name in _OF_SHAPES:
            return
        unknown = [value for value in taken if isinstance(value, Tensor) and self._what(value)]
        results = _flat([result])
        if self._is_answer(name, unknown, results):
            self.refuse(unknown[0], name)
        for value in taken if result is None else results:  # without a result it wrote into what it took
            if isinstance(value, Tensor):
                self._mark(value, self._what(unknown[0]))

    def refuse(self, tensor: Tensor, function: str) -> None:
        """Raise if a tensor is a stand-in.

        Args:
            tensor: that is asked for its values.
            function: that asks.

        Raises:
            UnknownValueError: it is one.
        """
        if what := self._what(tensor):
            raise UnknownValueError(
                f"the code around the model's layers takes {what} for a question ({function}), but that is on another"
                " pipeline stage, as this code did not run with the example that pipelined(model, example) was given:"
                " give an example that is like the batches, or the model pipeline_layers()"
            )

    def _is_answer(self, name: str, unknown: Sequence[Tensor], results: Sequence[Any]) -> bool:
        """Whether results tell something of the values of stand-ins, and do not show it."""
        if name in _FORGETFUL:
            return True
        views = {_address(tensor) for tensor in unknown}
        numbers = [tensor for tensor in unknown if not _holds_nan(tensor)]
        if numbers and not all(isinstance(r, Tensor) and _address(r) in views for r in results):
            return True
        shown = [result for result in results if isinstance(result, Tensor) and _holds_nan(result)]
        return not numbers and not shown and any(result is not None for result in results)

    def _mark(self, tensor: Tensor, what: str) -> None:
        if address := _address(tensor):
            self._storages[address] = tensor.untyped_storage(), what

    def refuse_drawn(self, values: Any, user: str) -> None:
        """Raise if one of the tensors among values was computed from random numbers that were drawn once more.

        Raises:
            ConfigurationError: it was.
        """
        if self._drawn and any(self._is_drawn(tensor) for tensor in tensors_of(values)):
            raise ConfigurationError(
                f"{user} is computed with random numbers that the code around the model's layers draws on this pipeline"
                " stage but did not draw before, on an earlier one: draw them in a layer and have it return them, or"
                " give the model pipeline_layers()"
            )

    def source_of(self, values: Any) -> str:
        """What one of the tensors among values is computed from and that is not there, or nothing."""
        return next((what for tensor in tensors_of(values) if (what := self._what(tensor))), "")

    def _is_drawn(self, value: Any) -> bool:
        return bool(self._drawn) and isinstance(value, Tensor) and _address(value) in self._drawn

    def stands_in(self, tensor: Tensor) -> bool:
        """Whether a tensor is a stand-in that may have a gradient."""
        return _holds_nan(tensor) and bool(self._what(tensor))

    def _what(self, tensor: Tensor) -> str:
        """What a tensor stands for, or nothing."""
        return self._storages.get(_address(tensor), (None, ""))[1]


class _Reads(TorchFunctionMode):
    """Sees who reads a tensor's memory, or asks for shape or dtype, and who hangs something on its gradient."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__()
        self._unknown = unknown

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._unknown.replaced((args, kwargs))
        if (kind := _KINDS.get(func)) is None:
            kind = _KINDS[func] = _kind_of(func)
        if kind == "read":
            self._unknown.refuse(args[0], func.__name__)
        elif kind == "hook":
            raise ConfigurationError(
                f"the code around the model's layers hangs a hook on a gradient ({func.__name__}), which would be lost"
                " where that comes from another pipeline stage: do it in a layer, or give the model pipeline_layers()"
            )
        elif kind == "gradient" and self._unknown.stands_in(args[0]):
            return torch.is_grad_enabled()
        elif kind == "fact":
            self._unknown.note_fact(args[:1])
        elif kind == "fact of another":
            self._unknown.note_fact(args[1:])
        return func(*args, **kwargs) if kwargs else func(*args)


_KINDS: dict[Any, str] = {}


def _kind_of(func: Any) -> str:
    """What a function that torch calls asks of a tensor; of most of them nothing."""
    name, of = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    if of is Tensor.requires_grad:
        return "gradient"
    if of in _FACTS or name in _FACT_CALLS:
        return "fact"
    kinds = {"read": _READS, "hook": _HOOKS, "fact of another": _FACTS_OF_OTHERS}
    return next((kind for kind, names in kinds.items() if name in names), "")


def _storages(values: Sequence[Any]) -> dict[int, Any]:
    """By address, held, so that no other gets it."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {address: tensor.untyped_storage() for tensor in tensors if (address := _address(tensor))}


def _is_among(values: Iterable[Any], storages: Mapping[int, Any]) -> bool:
    """Whether a tensor among values, or in lists of them, has one of these storages."""
    for value in values if storages else ():
        if isinstance(value, Tensor):
            if _address(value) in storages:
                return True
        elif isinstance(value, (list, tuple)) and _is_among(value, storages):
            return True
    return False


def _taken(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    return _flat([*args, *kwargs.values()] if kwargs else args)


def _flat(values: Sequence[Any]) -> list[Any]:
    """What a function of torch takes or returns: values, and lists of them."""
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _holds_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _address(tensor: Tensor) -> int:
    """Of a tensor's memory; 0 of one that has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # of a sparse tensor
        return 0
