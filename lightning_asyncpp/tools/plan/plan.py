"""``asyncpp plan RECIPE``: memory, speed and limits of a recipe on a kind of device; nothing is trained."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.private_names import PrivateNameError
from lightning_asyncpp.tools.plan.devices import DEVICES, Device, default_reserve, host_memory_gib
from lightning_asyncpp.tools.plan.fake_tensors import NeedsValueError, NoKernelError
from lightning_asyncpp.tools.plan.plan_report import Plan, plan, table
from lightning_asyncpp.tools.plan.planned_recipe import Recipe, build
from lightning_asyncpp.tools.plan.question import Question, Room
from lightning_asyncpp.tools.plan.timing import Speeds


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; a recipe that cannot be run ends with code 2, one that does not fit with code 1."""
    parser = _parser()
    own, rest = parser.parse_known_args(argv)
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
    from lightning_asyncpp.cli import read_configuration

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return read_configuration(["fit", "--config", recipe, *overrides])
    except SystemExit as end:
        if not end.code:
            raise  # help was asked for
        raise ValueError(printed.getvalue().rpartition("error: ")[2].strip()) from None


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
    if not Path(own.recipe).is_file():
        problems.append(f"there is no recipe {own.recipe}")
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


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "asyncpp plan",
        description="Say what a recipe needs on a kind of device, stage by stage, how fast it would be, what would fit"
        " as well, and what to change if it does not fit. Nothing is trained, and no memory is taken.",
        epilog="Beside these: whatever overrides the recipe (--model..., --data..., --trainer..., --optimizer...), as"
        " for `asyncpp fit`.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="recipe of `asyncpp fit`")
    parser.add_argument("--devices", type=int, help="number of devices, on all nodes; default: the recipe's")
    parser.add_argument("--device", default="h100", help=f"kind: {', '.join(DEVICES)} (default: h100)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="everything as JSON, alone or in a file")
    parser.add_argument("--no-search", action="store_true", help="leave out what would fit, and what to change")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is reached (default: 0.4)")
    parser.add_argument(
        "--bandwidth-share", type=float, default=0.7, help="share of the memory's speed that updates reach (0.7)"
    )
    parser.add_argument("--memory", type=float, help="GiB of a device, in place of the kind's")
    parser.add_argument("--reserve", type=float, help="GiB of it that are left free; default: 2 and 5 %% of it on GPUs")
    parser.add_argument("--tflops", type=float, help="peak in bf16, in place of the kind's")
    parser.add_argument("--bandwidth", type=float, help="GB/s of its memory, in place of the kind's")
    parser.add_argument("--link", type=float, help="GB/s between devices of a node, one direction")
    parser.add_argument("--network", type=float, help="GB/s between nodes, per device and direction")
    parser.add_argument("--devices-per-node", type=int, help="default: those of the recipe's nodes, or the kind's")
    return parser


if __name__ == "__main__":
    main()
