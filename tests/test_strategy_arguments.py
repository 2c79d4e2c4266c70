"""What no number of processes could make right is refused where a strategy is made, all of it at once."""

from __future__ import annotations

import functools
import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from lightning_asyncpp import fabric, trainer
from lightning_asyncpp.errors import ConfigurationError

STRATEGIES = [
    getattr(package, name)
    for package in (trainer, fabric)
    for name in ("AsyncPipelineStrategy", "SyncPipelineStrategy")
]
WRONG: list[tuple[str, Any, str]] = [
    ("microbatches", 0, "at least 1"),
    ("microbatches", 2.5, "a whole number"),
    ("partition", [2, 0], "at least 1"),
    ("state_dict_type", "shard", "must be 'full' or 'sharded'"),
    ("staleness", "lest", "'uniform' or 'least'"),
    ("slack", -1, "0 or more, or 'exact'"),
    ("slack", "exactly", "0 or more, or 'exact'"),
    ("partition", [], "'auto', 'uniform', or a list"),
]
OF_ONE_PROCESS = [package.DelayedGradientStrategy for package in (trainer, fabric)]
OF_EVERY_STRATEGY = {"accelerator", "cluster_environment", "checkpoint_io", "precision", "precision_plugin"}
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "strategies.md"


def name_of(strategy: type) -> str:
    return f"{strategy.__module__}.{strategy.__name__}"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
@pytest.mark.parametrize(("name", "value", "mend"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG])
def test_a_wrong_argument_is_named_with_its_value_and_the_mend(
    strategy: type, name: str, value: Any, mend: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        strategy(**{name: value})
    assert name in str(caught.value)
    assert repr(value).strip("[]") in str(caught.value)
    assert mend in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
def test_all_are_named_at_once(strategy: type) -> None:
    with pytest.raises(ConfigurationError) as caught:
        strategy(partition="even", nonfinite_gradients="leave", state_dict_type="")
    for name in ("partition='even'", "nonfinite_gradients='leave'", "state_dict_type=''"):
        assert name in str(caught.value)


@pytest.mark.parametrize("package", [trainer, fabric], ids=lambda package: package.__name__)
def test_what_does_not_fit_the_ranks_is_found_before_they_connect(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are not there: who waited for them would not come back before the timeout."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    strategy = package.AsyncPipelineStrategy(microbatches=2, timeout=timedelta(seconds=5))
    run = (L.Trainer if package is trainer else L.Fabric)(strategy=strategy, devices=3, accelerator="cpu")
    begin = functools.partial(run.fit, BoringModel()) if isinstance(run, L.Trainer) else run.launch
    with pytest.raises(ConfigurationError, match=r"microbatches=2 is smaller than the number of stages \(3\)"):
        begin()


def test_types_hide_nothing_else() -> None:
    with pytest.raises(ConfigurationError) as caught:
        trainer.AsyncPipelineStrategy(microbatches=2.5, lookahead=-1, nonfinite_gradients="no")
    for name in ("microbatches=2.5", "lookahead=-1", "nonfinite_gradients='no'"):
        assert name in str(caught.value)


@pytest.mark.parametrize("strategy", OF_ONE_PROCESS, ids=name_of)
def test_arguments_of_one_process(strategy: type) -> None:
    with pytest.raises(ConfigurationError) as caught:
        strategy(stages=2, microbatches=0, slack="exactly")
    for name in ("microbatches=0", "slack='exactly'"):
        assert name in str(caught.value)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *OF_ONE_PROCESS], ids=name_of)
def test_the_signature_has_every_argument_and_no_other_is_taken(strategy: type) -> None:
    parameters = inspect.signature(strategy).parameters
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert {"microbatches", "partition", "slack"} < parameters.keys()
    assert ("delay" in parameters) == (strategy in OF_ONE_PROCESS)
    with pytest.raises(TypeError, match=r"\.__init__\(\) .*unexpected keyword argument 'lookahed'"):
        strategy(lookahed=1)


def test_arguments_may_be_given_by_position_in_the_order_that_is_shown() -> None:
    settings = fabric.AsyncPipelineStrategy(8, "least", 0, 2).session.settings
    assert (settings.microbatches, settings.lookahead, settings.staleness) == (8, 2, "least")


def told_defaults(heading: str) -> dict[str, str]:
    """Argument -> what the table under a heading of the page tells as its default."""
    section = re.split(r"(?m)^## ", PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2])[0]
    told = {}
    for names, cell in re.findall(r"(?m)^\| (`.*?`) \| (.*?) ?\|", section):
        names, cells = re.findall(r"`(\w+)`", names), cell.split(", ")
        told |= dict(zip(names, cells if len(cells) == len(names) else [cell] * len(names)))
    return told


@pytest.mark.parametrize(("heading", "strategies"), [("Arguments", STRATEGIES), ("delayed_gradient", OF_ONE_PROCESS)])
def test_the_page_tells_of_every_argument_and_its_default(heading: str, strategies: list[type]) -> None:
    parameters = {name: p for strategy in strategies for name, p in inspect.signature(strategy).parameters.items()}
    of_ddp = inspect.signature(DDPStrategy).parameters
    told = told_defaults(heading)
    assert told.keys() >= parameters.keys() - OF_EVERY_STRATEGY
    assert parameters.keys() >= told.keys()
    for name, cell in told.items():
        default = parameters[name].default
        if cell == "as in DDP":
            assert default == (of_ddp[name].default if name in of_ddp else False), name
        else:
            assert default == value_of(cell), name


def value_of(cell: str) -> Any:
    """Of a default in a table; in words it stands for None."""
    try:
        return eval(cell.strip("`"), {})
    except SyntaxError:
        return None
