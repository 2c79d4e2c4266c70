"""``asyncpp plan RECIPE``: memory, speed and limits of a recipe on a kind of device; nothing is trained."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import CONFIG, recipes_in
from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.lightning_cli.recipe_names import recipe_path
from lightning_asyncpp.private_names import PrivateNameError
from lightning_asyncpp.tools.parsers import plan_parser
from lightning_asyncpp.tools.plan.devices import DEVICES, Device, default_reserve, host_memory_gib
from lightning_asyncpp.tools.plan.fake_tensors import NeedsValueError, NoKernelError
from lightning_asyncpp.tools.plan.plan_report import Plan, plan, table
from lightning_asyncpp.tools.plan.planned_recipe import Recipe, build
from lightning_asyncpp.tools.plan.question import Question, Room
from lightning_asyncpp.tools.plan.timing import Speeds


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; a recipe that cannot be run ends with code 2, one that does not fit with code 1."""
    parser = plan_parser()
    own, rest = parser.parse_known_args(_with_recipe_in_front(sys.argv[1:] if argv is None else argv))
    if problems := _problems(own):
        parser.error("; ".join(problems))
    try:
        made = make_plan(own, rest)
    except (NeedsValueError, NoKernelError) as error:
        what = "looks at values of tensors" if isinstance(error, NeedsValueError) else "cannot tell a result's shape"
        print(
            f"asyncpp plan: error: a layer or the optimizer {what}, which tensors without memory do not have: {error}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except (ConfigurationError, MisconfigurationException, ValueError, TypeError, PrivateNameError) as error:
        print(f"asyncpp plan: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if own.json is not None:
        text = json.dumps(made.as_json(), indent=2)
        if own.json == "-":
            print(text)
        else:
            Path(own.json).write_text(text + "\n", encoding="utf-8")
    if own.json != "-":
        print(table(made))
    if not made.question.fits:
        raise SystemExit(1)


def _with_recipe_in_front(argv: Sequence[str]) -> list[str]:
    """Let ``--config RECIPE`` stand for a first ``RECIPE``."""
    recipes = [] if argv and not argv[0].startswith("-") else recipes_in(argv)[:1]
    if not recipes:
        return list(argv)
    at = next(i for i, argument in enumerate(argv) if argument.partition("=")[0] in CONFIG)
    return [*recipes, *argv[:at], *argv[at + (1 if "=" in argv[at] else 2) :]]


def make_plan(own: Namespace, overrides: Sequence[str]) -> Plan:
    """Plan a recipe.

    Args:
        own: this command's arguments.
        overrides: arguments of ``asyncpp fit``.
    """
    recipe = build(_parsed(own.recipe, overrides), own.devices)
    device = _device(own)
    per_node = own.devices_per_node or _per_node(recipe, device)
    memory = device.memory_gib or host_memory_gib() / min(per_node, recipe.devices)
    reserve = default_reserve(device) if own.reserve is None else own.reserve
    if reserve >= memory:
        raise ValueError(f"a reserve of {reserve:g} GiB leaves nothing of {memory:g}: give --reserve, or more --memory")
    room = Room(Speeds(device, own.mfu, own.bandwidth_share, per_node), memory, reserve)
    question = Question(recipe, recipe.settings, recipe.devices, room)
    return plan(question, search=not own.no_search)


def _per_node(recipe: Recipe, device: Device) -> int:
    """Devices of a node: the recipe's nodes; one node that the recipe describes may be larger than usual ones."""
    if recipe.nodes > 1:
        return recipe.per_node or -(-recipe.devices // recipe.nodes)
    return max(recipe.per_node or 1, device.per_node if device.is_gpu else recipe.devices)


def _parsed(recipe: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe as `asyncpp fit` understands it; of its parser's complaint, without the usage.

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
        said = printed.getvalue().rpartition("error: ")[2].partition("\n(`")[0].strip()
        raise ValueError(f"{said}\n(`asyncpp plan --help` lists the options)") from None


def _device(own: Namespace) -> Device:
    device = DEVICES[own.device]
    given = {name: getattr(own, name) for name in ("tflops", "bandwidth", "link", "network")}
    given["memory_gib"] = own.memory
    return replace(device, **{name: value for name, value in given.items() if value is not None})


def _problems(own: Namespace) -> list[str]:
    """What is wrong with this command's own arguments."""
    problems = []
    if own.device not in DEVICES:
        problems.append(f"--device {own.device} is none of {', '.join(DEVICES)}: take the nearest, and give --memory,"
                        " --tflops, --bandwidth, --link and --network")  # fmt: skip
    try:
        own.recipe = recipe_path(own.recipe)
    except ConfigurationError as error:
        problems.append(str(error))
    for name in ("devices", "devices_per_node", "memory", "tflops", "bandwidth", "link", "network"):
        value = getattr(own, name)
        if value is not None and not 0 < value < math.inf:
            problems.append(f"--{name.replace('_', '-')} {value:g} must be above 0, and finite")
    for name in ("mfu", "bandwidth_share"):
        if not 0 < getattr(own, name) <= 1:
            problems.append(f"--{name.replace('_', '-')} {getattr(own, name):g} must be above 0 and at most 1")
    if own.reserve is not None and not 0 <= own.reserve < math.inf:
        problems.append(f"--reserve {own.reserve:g} must be 0 or more, and finite")
    if own.json not in (None, "-") and (not Path(own.json).parent.is_dir() or Path(own.json).is_dir()):
        problems.append(f"--json {own.json} is no file in a folder that exists")
    return problems


if __name__ == "__main__":
    main()
