"""``pytorch_lightning``, the same code in another package: whoever mixes the two is told which one is meant."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from lightning.pytorch.utilities import compile as lightnings_check

from lightning_asyncpp.errors import ConfigurationError

_OTHER = "pytorch_lightning"
_MEANT = f"lightning_asyncpp works with `import lightning.pytorch as pl`, and not with `import {_OTHER} as pl`"


def check_package(module: object) -> None:
    """Take a module of ``lightning.pytorch``, or anything else.

    Raises:
        ConfigurationError: it is one of ``pytorch_lightning``.
    """
    if any(cls.__module__.partition(".")[0] == _OTHER for cls in type(module).__mro__):
        raise ConfigurationError(f"{type(module).__name__} is a module of {_OTHER}: {_MEANT}")


def refuse_other_package(names: Iterable[str]) -> None:
    """Have both packages' Trainers say what is meant: of the other's module, and of strategies by name."""
    # Lightning's own check asks where the user's class was written, which is in neither package.
    if hasattr(lightnings_check, "_check_mixed_imports"):
        lightnings_check._check_mixed_imports = check_package
    registers = _Registers(names)
    registers.find_spec(_OTHER)
    sys.meta_path.insert(0, registers)


class _Registers:
    """Finds no module: asked for one, it has the other package know names once that has been imported."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def find_spec(self, name: str, *_: object) -> None:
        if self._names and name.startswith(_OTHER):
            registry: Any = getattr(sys.modules.get(f"{_OTHER}.strategies"), "StrategyRegistry", None)
            for known in self._names if registry is not None else ():
                registry.register(known, _refuse, override=True)
                self._names = ()


def _refuse() -> NoReturn:
    raise ConfigurationError(_MEANT)
