"""The recipe of an ablation: what to train, and how it is read and checked."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_asyncpp.core.settings import is_whole
from lightning_asyncpp.tools.ablation.grid import UNCORRECTED
from lightning_asyncpp.tools.ablation.recipe.yaml_files import Section, read_yaml, set_at

STRATEGY = "lightning_asyncpp.DelayedGradientStrategy"
_KEYS = (
    "name", "recipe", "output", "metric", "seeds", "seed_arguments", "lr_extensions", "diverged_above", "strategy",
    "optimizers", "corrections", "delays", "variants",
)  # fmt: skip
_OPTIMIZER_KEYS = ("class_path", "init_args", "lr", "lr_argument", "momentum", "corrections")


@dataclass(frozen=True)
class ClassConfig:
    """A class and what it is built with, as in a recipe of ``asyncpp fit``."""

    class_path: str
    init_args: Mapping[str, Any]

    def content(self) -> dict[str, Any]:
        """A copy as plain values."""
        return {"class_path": self.class_path, "init_args": copy.deepcopy(dict(self.init_args))}


@dataclass(frozen=True)
class Momentum:
    """An init argument to vary beside the learning rate."""

    argument: str
    """Its place in init_args, such as ``betas.0``."""
    values: tuple[float, ...]
    """What it is set to."""


@dataclass(frozen=True)
class Correction:
    """A wrapper whose ``base`` is the optimizer."""

    name: str
    """As in the tables."""
    config: ClassConfig | None
    """``None``: the optimizer alone."""
    same_lr: bool = False
    """Use the learning rate that was chosen without the correction instead of searching."""


ALONE = Correction(UNCORRECTED, None)


@dataclass(frozen=True)
class Delay:
    """How old the gradients are: init arguments of the strategy."""

    init_args: Mapping[str, Any]

    @property
    def text(self) -> str:
        """As in the tables: the delay, and whatever is set besides it and the stages."""
        more = [f"{k}={v}" for k, v in sorted(self.init_args.items()) if k not in ("delay", "stages")]
        return " ".join([str(self.init_args["delay"]), *more])

    @property
    def stages(self) -> int | None:
        """Number of stages; None if it is not given."""
        stages: int | None = self.init_args.get("stages")
        return stages

    @property
    def is_fresh(self) -> bool:
        """Whether no gradient is delayed."""
        return bool(self.init_args["delay"] == 0)


@dataclass(frozen=True)
class Variant:
    """The base recipe with some of its places set anew."""

    name: str | None
    """As in the tables; None for the base recipe as it is."""
    places: Mapping[str, Any]
    """Place, such as ``trainer.max_steps`` -> value."""

    def of(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the base recipe with the places set.

        Raises:
            KeyError: a place leads through something that is neither a mapping nor a list; says so.
        """
        content = copy.deepcopy(dict(base))
        for place, value in self.places.items():
            set_at(content, place, copy.deepcopy(value))
        return content


BASE = Variant(None, {})


@dataclass(frozen=True)
class OptimizerGrid:
    """One optimizer and the values to try."""

    name: str
    config: ClassConfig
    lr_argument: str
    lrs: tuple[float, ...]
    """Rising."""
    momentum: Momentum | None
    corrections: tuple[Correction, ...]

    def build(self, lr: float, momentum: float | None, correction: Correction) -> dict[str, Any]:
        """Class and arguments of the optimizer, in its correction if there is one."""
        content = self.config.content()
        set_at(content["init_args"], self.lr_argument, lr)
        if self.momentum is not None:
            set_at(content["init_args"], self.momentum.argument, momentum)
        if correction.config is None:
            return content
        wrapper = correction.config.content()
        wrapper["init_args"]["base"] = content
        return wrapper


@dataclass(frozen=True)
class Recipe:
    """A grid of trainings."""

    path: Path
    name: str
    base_path: Path
    base: Mapping[str, Any]
    """Content of the recipe of ``asyncpp fit`` that every cell trains."""
    output: Path
    metric: str
    seeds: tuple[int, ...]
    """The first one searches the learning rate."""
    seed_arguments: tuple[str, ...]
    """Places in the base recipe that get the seed, besides ``seed_everything``."""
    lr_extensions: int
    diverged_above: float | None
    strategy: str
    optimizers: tuple[OptimizerGrid, ...]
    delays: tuple[Delay, ...]
    variants: tuple[Variant, ...] = (BASE,)
    """What is compared each within itself."""


def read_recipe(path: Path) -> tuple[Recipe | None, list[str]]:
    """Read a recipe as far as it goes.

    Returns:
        What can be used of it, ``None`` if nothing can be trained with it, and all problems.
    """
    problems: list[str] = []
    try:
        section = Section("", read_yaml(path), _KEYS, problems)
    except ValueError as error:
        return None, [str(error)]
    if not section.content:
        return None, problems or [f"{path} is empty"]
    base_path, base = _base(section, path.parent)
    corrections = _corrections(section, "corrections")
    recipe = Recipe(
        path=path,
        name=_name(section, "name", section.text("name")),
        base_path=base_path,
        base=base,
        output=_output(section, path.parent),
        metric=section.text("metric", "val_loss"),
        seeds=tuple(s for s in section.values("seeds", [1]) if _is_seed(section, s)),
        seed_arguments=_seed_arguments(section, base),
        lr_extensions=section.count("lr_extensions", 2, 0),
        diverged_above=section.number("diverged_above"),
        strategy=section.text("strategy", STRATEGY),
        optimizers=_optimizers(section, corrections),
        delays=_delays(section),
        variants=_variants(section, base),
    )
    usable = bool(base and recipe.optimizers and recipe.delays and recipe.seeds and recipe.strategy)
    return (recipe if usable else None), problems


def _base(section: Section, folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / section.text("recipe")
    if path == folder:
        return path, {}
    try:
        content = read_yaml(path)
    except ValueError as error:
        section.problem("recipe", f"{error}; name a recipe of `asyncpp fit`, relative to {folder}")
        return path, {}
    if not isinstance(content, dict) or not content:
        section.problem("recipe", f"{path} holds no mapping; name a recipe of `asyncpp fit`")
        return path, {}
    for key in ("trainer", "model", "data"):
        if not isinstance(content.get(key, {}), dict):
            section.problem("recipe", f"{path}: {key} is {content[key]!r}; write it out as a mapping")
            return path, {}
    if not isinstance(content.get("model", {}).get("init_args", {}), dict):
        section.problem("recipe", f"{path}: model.init_args is {content['model']['init_args']!r}; make it a mapping")
        return path, {}
    if content.get("ckpt_path") is not None:
        section.problem("recipe", f"{path}: ckpt_path would resume one training in all of them; take it out")
    return path, content


def _output(section: Section, folder: Path) -> Path:
    return folder / section.text("output") if "output" in section.content else Path("runs/ablation")


def _name(section: Section, key: str, name: object) -> str:
    """Names become parts of file names."""
    if not isinstance(name, str):
        section.problem(key, f"the name {name!r} is not a text; quote it")
        return ""
    if key == "name" and name in ("cells", "lock"):
        section.problem(key, f"{name!r} is taken by the tables' common files; choose another")
    if name and not re.fullmatch(r"[\w+=-][\w.+=-]*", name):
        section.problem(key, f"the name {name!r} may have letters, digits and _ . + = - only")
    return name


def _is_seed(section: Section, seed: object) -> bool:
    if isinstance(seed, int) and is_whole(seed) and 0 <= seed < 2**32:
        return True
    section.problem("seeds", f"{seed!r} is not a whole number from 0 to 2^32 - 1")
    return False


def _seed_arguments(section: Section, base: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    for path in section.values("seed_arguments") if "seed_arguments" in section.content else ():
        try:
            set_at(copy.deepcopy(dict(base)), str(path), 0)
            found.append(str(path))
        except KeyError as error:
            section.problem("seed_arguments", f"{path!r} is no place in the base recipe: {error.args[0]}")
    return tuple(found)


def _variants(section: Section, base: Mapping[str, Any]) -> tuple[Variant, ...]:
    found = []
    for name, places in (section.mapping("variants", required=True) if "variants" in section.content else {}).items():
        variant = Variant(_name(section, "variants", name), places if isinstance(places, dict) else {})
        if not isinstance(places, dict):
            section.problem(f"variants.{name}", f"must map places in the base recipe to values, got {places!r}")
            continue
        try:
            variant.of(base)
            found.append(variant)
        except KeyError as error:
            section.problem(f"variants.{name}", str(error.args[0]))
    return tuple(found) or (BASE,)


def _class(section: Section) -> ClassConfig:
    return ClassConfig(section.text("class_path"), section.mapping("init_args"))


def _optimizers(section: Section, corrections: tuple[Correction, ...]) -> tuple[OptimizerGrid, ...]:
    grids = []
    for name, content in section.mapping("optimizers", required=True).items():
        part = Section(f"optimizers.{name}", content, _OPTIMIZER_KEYS, section.problems)
        if not part.content:
            continue
        before = len(section.problems)
        grid = OptimizerGrid(
            name=_name(section, "optimizers", name),
            config=_class(part),
            lr_argument=part.text("lr_argument", "lr"),
            lrs=part.numbers("lr", "a learning rate, a finite number above 0", 0, above=True),
            momentum=_momentum(part),
            corrections=_corrections(part, "corrections") if "corrections" in part.content else corrections,
        )
        _check_places(part, grid)
        if len(section.problems) == before:
            grids.append(grid)
    return tuple(grids)


def _momentum(part: Section) -> Momentum | None:
    if part.content.get("momentum") is None:
        return None
    momentum = Section(part.place("momentum"), part.content["momentum"], ("argument", "values"), part.problems)
    if not momentum.content:
        return None
    return Momentum(momentum.text("argument"), momentum.numbers("values", "a finite number of at least 0", 0))


def _check_places(part: Section, grid: OptimizerGrid) -> None:
    if grid.lr_argument in grid.config.init_args:
        part.problem(f"init_args.{grid.lr_argument}", "is set from the list `lr`; remove one of the two")
    places = {"lr_argument": grid.lr_argument, "momentum.argument": grid.momentum.argument if grid.momentum else ""}
    for key, place in places.items():
        try:
            set_at(grid.config.content()["init_args"], place, 0.0)
        except KeyError as error:
            part.problem(key, str(error.args[0]))
    if grid.momentum is not None and grid.momentum.argument == grid.lr_argument:
        part.problem("momentum.argument", f"{grid.lr_argument!r} is set from the list `lr`; name another one")


def _corrections(section: Section, key: str) -> tuple[Correction, ...]:
    content = section.mapping(key) or {ALONE.name: None}
    if content.get(ALONE.name) is not None:
        section.problem(f"{key}.{ALONE.name}", "must be null: it is the optimizer alone")
    found = []
    for name, entry in content.items():
        name = _name(section, key, name)
        if entry is None or name == ALONE.name:
            if name != ALONE.name:
                section.problem(f"{key}.{name}", "is null: the optimizer alone is called `none`")
            found.append(ALONE)
            continue
        known = ("class_path", "init_args", "lr")
        part = Section(section.place(f"{key}.{name}"), entry, known, section.problems)
        if not part.content:
            continue
        if part.content.get("lr", "search") not in ("same", "search"):
            part.problem("lr", f"must be 'same' or 'search', got {part.content['lr']!r}")
        if part.content.get("lr") == "same" and ALONE.name not in content:
            part.problem("lr", f"'same' is that of the optimizer alone; add `{ALONE.name}: null` to {key}")
        found.append(Correction(name, _class(part), part.content.get("lr") == "same"))
    return tuple(found)


def _delays(section: Section) -> tuple[Delay, ...]:
    found: list[Delay] = []
    for entry in section.values("delays", [0, 1]):
        init_args = entry if isinstance(entry, dict) else {"delay": entry}
        delay = init_args.get("delay")
        if not (delay if isinstance(delay, str) else isinstance(delay, int) and is_whole(delay) and delay >= 0):
            section.problem(
                "delays", f"{entry!r} has no delay: give a whole number of at least 0, or a name such as pipedream"
            )
        elif (Delay(init_args).text, Delay(init_args).stages) in [(d.text, d.stages) for d in found]:
            section.problem("delays", f"{entry!r} is there twice")
        else:
            found.append(Delay(init_args))
    return tuple(found)
