"""``pytorch_lightning``, the same code in another package: whoever mixes the two is told which one is meant."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn

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
    """Have both packages' Trainers say what is meant: of the other's module, and of strategies by name.

    The other package's Trainer knows the names if that package has been imported before.
    """
    # Lightning's own check asks where the user's class was written, which is in neither package.
    if hasattr(lightnings_check, "_check_mixed_imports"):
        lightnings_check._check_mixed_imports = check_package
    if (other := sys.modules.get(f"{_OTHER}.strategies")) is not None:
        for name in names:
            other.StrategyRegistry.register(name, _refuse, override=True)


def _refuse() -> NoReturn:
    raise ConfigurationError(_MEANT)
