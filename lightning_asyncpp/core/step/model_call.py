"""The one call of ``self.model(...)`` in the user's step: captured on the first stage, redirected on the last.

Both run the step up to its call with the same micro-batch and the same random numbers, and a digest of the call's
arguments tells whether they were the same. What the step keeps in the module after the call exists on the last stage
alone, and so do random numbers of Python or NumPy that are drawn there: where such a thing reaches the arguments, the
last stage, which has no use for them, would train with another model input than it thinks.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.batches.tree import leaves_of
from lightning_asyncpp.core.cut.module_as_network import called_by_steps
from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")
NOT_LOOKED_AT = 0
_PARTS, _NUMBER = struct.Struct("<fI"), struct.Struct("<q")
_SAMPLED, _MOST_LEAVES = 64, 64  # elements of each tensor, and tensors or numbers
_TOLERANCE = 1e-3  # relative: operations before the call may round otherwise on another device, in bf16, too
_WEIGHTS = (1.0, 2.7, 1.9, 3.4, 1.3, 2.2, 3.1)  # so that the order of arguments counts


class ModelCall:
    """Replaces ``model.forward`` while a user's step runs.

    Args:
        model: the module that the step calls.
        name: how the user calls it, for messages.
    """

    def __init__(self, model: nn.Module, name: str = "self.model") -> None:
        self.model = model
        self.name = name

    def capture(self, step: Callable[[], Any], look: Callable[[], None] = lambda: None) -> tuple[tuple, dict[str, Any]]:
        """Run the step up to the call of the model and return its arguments.

        Args:
            step: calls the model.
            look: called at the call, where everything is set that the step sets around it.

        Raises:
            ConfigurationError: the step ended without calling the model.
        """

        def leave(*args: Any, **kwargs: Any) -> Any:
            look()
            raise _Left(args, kwargs)

        try:
            self._run(step, leave)
        except _Left as left:
            return left.arguments
        raise ConfigurationError(self._calls(0))

    def redirect(self, step: Callable[[], T], compute: Callable[[tuple, dict[str, Any]], Any]) -> T:
        """Run the whole step with the output of ``compute`` for that of the model.

        Raises:
            ConfigurationError: the step called the model never or more than once.
        """
        calls = 0

        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigurationError(self._calls(2))
            return compute(args, kwargs)

        result = self._run(step, replacement)
        if calls == 0:
            raise ConfigurationError(self._calls(0))
        return result

    def _run(self, step: Callable[[], T], forward: Callable[..., Any]) -> T:
        # An instance attribute hides the class's forward; hooks of the module still run around it. It is no parameter
        # and no module, so the way around nn.Module's slow __setattr__ is open.
        attributes = called_by_steps(self.model).__dict__
        own = attributes.get("forward")
        attributes["forward"] = forward
        try:
            return step()
        finally:
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own

    def _calls(self, count: int) -> str:
        times = "without calling" if count == 0 else "after calling twice"
        inside = "its forward()" if self.name == "self" else self.name
        skips = f"; to leave a batch out return a loss of 0, such as 0.0 * {self.name}(...).sum()"
        return (
            f"the step ended {times} {self.name}(...): under a pipeline it must call it exactly once per micro-batch,"
            f" because the stages before the last one run only that call; move everything around it into {inside} or"
            f" compute it from its output{'' if count else skips}"
        )


def digest(args: tuple, kwargs: dict[str, Any]) -> int:
    """The number of a call's arguments, of 64 bits: the size of what is real in them, and a hash of everything else."""
    size, told = 0.0, zlib.crc32(repr(sorted(kwargs)).encode())
    for place, leaf in zip(range(_MOST_LEAVES), leaves_of((args, [kwargs[key] for key in sorted(kwargs)]))):
        real, other = _of_tensor(leaf) if isinstance(leaf, Tensor) else _of_number(leaf)
        size += real * _WEIGHTS[place % len(_WEIGHTS)]
        told = zlib.crc32(other, told)
    return int(_NUMBER.unpack(_PARTS.pack(min(size, 3e38), told | 1))[0])


def differ(there: int, here: int) -> bool:
    """Whether two digests are those of different arguments."""
    (size, told), (own_size, own_told) = (_PARTS.unpack(_NUMBER.pack(number)) for number in (there, here))
    return told != own_told or not math.isclose(size, own_size, rel_tol=_TOLERANCE, abs_tol=1e-6)


class _Left(BaseException):
    """Carries the arguments of ``self.model(...)`` out of the user's step."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


def _of_tensor(tensor: Tensor) -> tuple[float, bytes]:
    """The size of what is real in a tensor, and what else there is to say of it."""
    text = f"{tuple(tensor.shape)}{tensor.dtype}".encode()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    if not flat.numel() or flat.is_meta or type(flat) is not Tensor:  # one without values, or that may have none
        return 0.0, text
    some = flat[:: -(-flat.numel() // _SAMPLED)].cpu()
    if not some.is_floating_point():
        return 0.0, text + some.contiguous().view(torch.uint8).numpy().tobytes()
    weights = torch.linspace(1.0, 2.0, some.numel(), dtype=torch.float64)
    finite = torch.nan_to_num(some.double(), nan=0.5, posinf=0.25, neginf=0.125)
    return float((finite.abs() * weights + finite.clamp(min=0)).sum()), text


def _of_number(leaf: Any) -> tuple[float, bytes]:
    if isinstance(leaf, float):
        return (abs(leaf) if math.isfinite(leaf) else 0.0), b"float"
    is_plain = isinstance(leaf, (bool, int, str, bytes, type(None)))
    return 0.0, (repr(leaf) if is_plain else type(leaf).__name__).encode()
