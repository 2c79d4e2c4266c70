"""``asyncpp plan RECIPE``: whether a recipe fits on a kind of device, and how fast it would be; nothing is trained."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import CONFIG, recipes_in
from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.lightning_cli.recipe_names import recipe_path
from lightning_asyncpp.tools.parsers import plan_parser
from lightning_asyncpp.tools.plan.changes import changes_of
from lightning_asyncpp.tools.plan.devices import DEVICES, Device, default_reserve, host_memory_gib
from lightning_asyncpp.tools.plan.estimate import Estimate, Machine
from lightning_asyncpp.tools.plan.recipe import Recipe, build
from lightning_asyncpp.tools.plan.report import Report


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; a recipe that cannot be run ends with code 2, one that does not fit with code 1."""
    own, rest = plan_parser().parse_known_args(_with_recipe_in_front(sys.argv[1:] if argv is None else argv))
    try:
        report = make_report(own, rest)
    except (DataDependentOutputException, UnsupportedOperatorException) as error:
        _end(f"a layer or the optimizer looks at values, which tensors without memory do not have: {error}")
    except (ConfigurationError, MisconfigurationException, ValueError, TypeError) as error:
        _end(str(error))
    text = report.table()
    if own.json is not None:
        content = json.dumps(report.as_json(), indent=2)
        text = content if own.json == "-" else text
        if own.json != "-":
            Path(own.json).write_text(content + "\n", encoding="utf-8")
    print(text)
    if not report.estimate.fits:
        raise SystemExit(1)


def _end(error: str) -> None:
    print(f"asyncpp plan: error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _with_recipe_in_front(argv: Sequence[str]) -> list[str]:
    """Let ``--config RECIPE`` stand for a first ``RECIPE``."""
    recipes = [] if argv and not argv[0].startswith("-") else recipes_in(argv)[:1]
    if not recipes:
        return list(argv)
    at = next(i for i, argument in enumerate(argv) if argument.partition("=")[0] in CONFIG)
    return [*recipes, *argv[:at], *argv[at + (1 if "=" in argv[at] else 2) :]]


def make_report(own: Namespace, overrides: Sequence[str]) -> Report:
    """Plan a recipe.

    Args:
        own: this command's arguments.
        overrides: arguments of ``asyncpp fit``.
    """
    recipe = build(_parsed(recipe_path(own.recipe), overrides), own.devices)
    given = {name: getattr(own, name) for name in ("tflops", "bandwidth", "link", "network")}
    given["memory_gib"] = own.memory
    device = replace(DEVICES[own.device], **{name: value for name, value in given.items() if value is not None})
    per_node = own.devices_per_node or _per_node(recipe, device)
    memory = device.memory_gib or host_memory_gib() / min(per_node, recipe.devices)
    reserve = default_reserve(device) if own.reserve is None else own.reserve
    machine = Machine(device, own.mfu, own.bandwidth_share, per_node, memory, reserve)
    estimate = Estimate(recipe, recipe.settings, recipe.devices, machine)
    return Report(estimate, [] if estimate.fits else changes_of(estimate))


def _per_node(recipe: Recipe, device: Device) -> int:
    """Return the devices of a node: the recipe's; one node that the recipe describes may be larger than usual ones."""
    if recipe.nodes > 1:
        return recipe.per_node or -(-recipe.devices // recipe.nodes)
    return max(recipe.per_node or 1, device.per_node if device.is_gpu else recipe.devices)


def _parsed(recipe: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the recipe as `asyncpp fit` understands it; of its parser's complaint, without the usage.

    Raises:
        ValueError: it has one.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return read_configuration(["fit", "--config", recipe, *overrides], plan_parser().option_names)
    except SystemExit as end:
        if not end.code:
            raise  # help was asked for
        complaint = printed.getvalue().rpartition("error: ")[2].partition("\n(`")[0].strip()
        raise ValueError(f"{complaint}\n(`asyncpp plan --help` lists the options)") from None


if __name__ == "__main__":
    main()
