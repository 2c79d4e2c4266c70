"""Random numbers that the code around blocks draws: those of torch, of Python and of NumPy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # its documented place

from lightning_asyncpp.core.randomness import derive, seeded


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch draws random numbers."""
    if (may_draw := _MAY_DRAW.get(func)) is None:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        _MAY_DRAW[func] = may_draw = may_draw and func.overloadpacket.__name__ != "_fused_sdp_choice"
    if not may_draw:
        return False
    if "dot_product" in func.overloadpacket.__name__:  # attention, which mostly drops out nothing
        return any(type(value) is float and value > 0 for value in args) or bool(kwargs.get("dropout_p"))
    return True


_MAY_DRAW: dict[Any, bool] = {}


def drawn_from(seed: int, device: torch.device, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch with random numbers from a seed, also where it is given a generator."""
    if kwargs.get("generator") is not None:
        kwargs = {**kwargs, "generator": None}
    with seeded(seed, device):
        return func(*args, **kwargs)


def seed_host(seed: int, position: int) -> None:
    """Let Python and NumPy draw from a seed.

    Args:
        seed: of the code that runs.
        position: of the next block.
    """
    derived = derive(seed, "host", position)
    random.seed(derived)
    np.random.seed(derived % 2**32)


@contextmanager
def host_as_before() -> Iterator[None]:
    """Have Python and NumPy draw afterwards as if nothing had been drawn."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class SameDraws(TorchDispatchMode):
    """Meanwhile every function of torch draws from the same seed, wherever and as often as it is called.

    Args:
        model: which is run; its first parameter tells the device.
        blocks: names; Python and NumPy are seeded before the first and after each of them, and go on behind another
            submodule where they were before it, as a replay does it.

    Attributes:
        seed: that a replay draws meanwhile.
        on_host: whether code around the blocks drew Python's or NumPy's numbers.
        drew: whether torch drew some.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str] = ()) -> None:
        super().__init__()
        self._blocks = [model.get_submodule(name) for name in blocks]
        self._others = _beside(model, set(self._blocks)) if blocks else []
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.on_host = self.drew = False

    def __enter__(self) -> SameDraws:
        """Begin, with the position in front of the first block."""
        super().__enter__()
        self.seed = int(torch.randint(1 << 62, ()))
        self.drew = False
        self._position, self._inside = 0, list[ExitStack]()
        self._hooks = ExitStack()
        self._hooks.enter_context(host_as_before())
        for block in self._blocks:
            self._hooks.callback(block.register_forward_pre_hook(lambda *_: self._look(), prepend=True).remove)
            self._hooks.callback(block.register_forward_hook(lambda *_: self._pass()).remove)
        for module in self._others:
            self._hooks.callback(module.register_forward_pre_hook(lambda *_: self._enter_other(), prepend=True).remove)
            self._hooks.callback(module.register_forward_hook(lambda *_: self._inside.pop().close()).remove)
        self._seed()
        return self

    def __exit__(self, *error: Any) -> None:
        """Go on as before."""
        self._look()
        self._hooks.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        if draws(func, args, kwargs or {}):
            self.drew = True
            return drawn_from(0, self._device, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _enter_other(self) -> None:
        self._inside.append(ExitStack())
        self._inside[-1].enter_context(host_as_before())

    def _seed(self) -> None:
        seed_host(self.seed, self._position)
        self._states = _host_states()

    def _look(self) -> None:
        self.on_host |= self._states != _host_states()

    def _pass(self) -> None:
        self._position += 1
        self._seed()


def _beside(module: nn.Module, blocks: set[nn.Module]) -> list[nn.Module]:
    """The outermost submodules with parameters, without a block in them."""
    found: list[nn.Module] = []
    for child in module.children():
        if not blocks.isdisjoint(child.modules()):
            found += [] if child in blocks else _beside(child, blocks)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found


def _host_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), rest
