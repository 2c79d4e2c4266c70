"""``asyncpp plan RECIPE``: whether a recipe fits on a kind of device, and how fast it would be; nothing is trained."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.tools.parsers import plan_parser
from lightning_asyncpp.tools.plan.changes import changes_of
from lightning_asyncpp.tools.plan.devices import device_of
from lightning_asyncpp.tools.plan.estimate import Estimate
from lightning_asyncpp.tools.plan.recipe import build
from lightning_asyncpp.tools.plan.report import as_json, table
from lightning_asyncpp.tools.text import write_json


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; a recipe that cannot be run ends with code 2, one that does not fit with code 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _quiet():
            estimate = estimate_of(arguments)
            changes = [] if estimate.fits else changes_of(estimate, lambda more: estimate_of([*arguments, *more]))
            content = as_json(estimate, changes)
    except (DataDependentOutputException, UnsupportedOperatorException) as error:
        _end(f"a layer or the optimizer looks at values, which tensors without memory do not have: {error}")
    except (ConfigurationError, MisconfigurationException, ValueError, TypeError) as error:
        _end(str(error))
    path = plan_parser().parse_known_args(arguments)[0].json
    print(json.dumps(content, indent=2) if path == "-" else table(content))
    if path not in (None, "-"):
        write_json(path, content)
    if not estimate.fits:
        raise SystemExit(1)


def estimate_of(arguments: Sequence[str]) -> Estimate:
    """Plan what the arguments of the command ask for."""
    parser = plan_parser()
    own, rest = parser.parse_known_args(arguments)
    recipe = build(read_configuration(["fit", *rest], parser.option_names), own.devices)
    return Estimate(recipe, device_of(own, recipe))


def _end(error: str) -> None:
    print(f"asyncpp plan: error: {error}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out remarks on the devices of this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
