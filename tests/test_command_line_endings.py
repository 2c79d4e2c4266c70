"""How the command ends: the package's refusals in a line or two, errors of other code with their traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from lightning_asyncpp import cli
from lightning_asyncpp.cli import main
from lightning_asyncpp.data import DataError
from lightning_asyncpp.dependencies import optional_package
from lightning_asyncpp.errors import TRACEBACK, BatchMismatchError, ConfigurationError, raised_alike
from lightning_asyncpp.lightning_cli.messages import is_raised_by
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.optim import MuonAdamW

RECIPE = str(Path(__file__).parents[1] / "recipes/quickstart.yaml")
HINT = f"({TRACEBACK}=1 shows where)"


class Refusing(L.Callback):
    """A user's own callback, with a check of its own."""

    def __init__(self, number: int = 3) -> None:
        raise ValueError("this number is refused")


def raises(error: Exception) -> Callable[[Any], None]:
    def run(arguments: Any) -> None:
        raise error

    return run


def refused(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_what_a_class_in_place_of_a_name_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """jsonargparse tells of the name that a strategy could be."""
    arguments = ["--trainer.strategy.lookahead=-1", "--trainer.strategy.data_parallel_size=0"]
    assert refused("fit", RECIPE, *arguments) == 2
    lines = ["2 problems:", "  1. lookahead=-1 must be 0 or more", "  2. data_parallel_size=0 must be at least 1"]
    assert "asyncpp: error: " + "\n".join(lines) + "\n" in capsys.readouterr().err


def test_what_a_callback_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("fit", RECIPE, "--trainer.callbacks+=PipelineMonitor", "--trainer.callbacks.window=0") == 2
    assert capsys.readouterr().err.endswith(
        "error: PipelineMonitor needs numbers of at least 1: window=0, every_n_batches=10\n"
    )
    with pytest.raises(ValueError, match=r"^this number is refused$") as caught:
        main(["fit", RECIPE, f"--trainer.callbacks+={__name__}.Refusing"])
    assert caught.traceback[-1].name == "__init__"


@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError("no such shard"), 2), (BatchMismatchError("other batches"), 1), (ConfigurationError("cannot"), 2)],
    ids=lambda value: type(value).__name__,
)
def test_what_the_package_refuses_as_it_runs(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = "" if isinstance(error, ConfigurationError) else f"{HINT}\n"
    monkeypatch.setattr(cli, "run", raises(error))
    assert refused("fit") == code
    assert capsys.readouterr().err == f"asyncpp: error: {error}\n{hint}"
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert refused("fit") == code
    assert capsys.readouterr().err == f"asyncpp: error: [rank 1] {error}\n{hint}"
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(type(error)):
        main(["fit"])


def test_other_ranks_shorten_what_all_raise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(cli, "run", raises(raised_alike(DataError("no such shard " * 40), 0)))
    assert refused("fit") == 2
    assert len(capsys.readouterr().err) < 140


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), RuntimeError("x")])
def test_errors_of_other_code_are_left_alone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run", raises(error))
    with pytest.raises(type(error)) as caught:
        main(["fit"])
    assert caught.value is error


@pytest.mark.parametrize(
    ("call", "is_one"),
    [
        (lambda: MuonAdamW([nn.Parameter(torch.ones(2, 2))], adjust_lr="no"), True),
        (lambda: GPTConfig(vocab_size=-1, context_length=8), True),
        (lambda: optional_package("nowhere_to_be_found", "this"), True),
        (lambda: MuonAdamW(), False),  # Python raised it here, for arguments that are missing
        (lambda: int("x"), False),
    ],
)
def test_who_raised_it(call: Callable[[], Any], is_one: bool) -> None:
    with pytest.raises((ValueError, TypeError, ImportError)) as caught:
        call()
    assert is_raised_by(caught.value) == is_one
