"""A checkpoint is data: whatever its hyper-parameters name, nothing is imported, called, compiled or started for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp import GPTModule
from lightning_asyncpp.cli import AsyncppCLI, main, run
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.resumed_model import saved_hyper_parameters
from lightning_asyncpp.models import GPT, GPTConfig
from tests import test_command_line_checkpoints as beside
from tests.test_command_line_checkpoints import SIZES, asked, checkpoint, hyper_parameters, refusal

folder, model = beside.folder, beside.model
HERE = "tests.test_command_line_hostile_checkpoints"
BORING = ["--data", "lightning.pytorch.demos.boring_classes.BoringDataModule"]


@dataclass
class Sizes:
    """A user's own."""

    width: int = 3
    layer: type = nn.Linear
    names: list[str] = field(default_factory=list)


class Loss(nn.Module):
    """A user's own."""

    def __init__(self, inner: nn.Module | None = None, scale: float = 1.0) -> None:
        super().__init__()


class Typed(L.LightningModule):
    """A module with an argument of every kind."""

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer] = torch.optim.SGD,
        loss: nn.Module | None = None,
        kind: type[nn.Module] = nn.ReLU,
        either: str | nn.Module = "mean",
        anything: Any = None,
        untyped=None,  # type: ignore[no-untyped-def]
        options: dict[str, Any] | None = None,
        kinds: list[type[nn.Module]] | None = None,
        sizes: Sizes | None = None,
        name: str = "x",
        rates: Sequence[float] = (0.1, 0.2),
        texts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()


class Passing(Typed):
    """Hands the rest to its base."""

    def __init__(self, own: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)


@pytest.fixture
def trap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is there once the module ``trap`` was imported, or the program started."""
    mark = folder / "sprung"
    (folder / "trap.py").write_text(
        f"open({str(mark)!r}, 'w')\nclass Model:\n    def __init__(self, *given): pass\ndef call(*given): pass\n"
    )
    (folder / "trap.yaml").write_text("class_path: trap.Model\n")
    program = folder / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("trap", None)
    return mark


def typed(cls: str = "Typed", **values: Any) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": {"_class_path": f"{HERE}.{cls}", **values}}, "x.ckpt")


def of_typed(*arguments: str, cls: str = "Typed", subcommand: str = "fit") -> list[str]:
    return asked(subcommand, *BORING, "--model", f"{HERE}.{cls}", *arguments, recipe=False)


SPECIFIED = {"class_path": "trap.Model"}
HOSTILE: dict[str, dict[str, Any]] = {
    "a function": {"optimizer": "trap.call"}, "a class": {"optimizer": SPECIFIED}, "a layer": {"loss": "trap.Model"},
    "a layer's class": {"loss": SPECIFIED}, "a type": {"kind": "trap.Model"}, "one of two": {"either": "trap.Model"},
    "anything": {"anything": SPECIFIED}, "anything as text": {"anything": "{class_path: trap.Model}"},
    "anything as escaped text": {"anything": '{"class\\x5fpath": trap.Model}'},
    "escaped text without a type": {"untyped": '{"class\\u005fpath": "trap.Model"}'},
    "escaped text below": {"options": {"a": '{"class\\x5fpath": trap.Model}'}},
    "options as escaped text": {"options": '{"a": {"class\\x5fpath": trap.Model}}'},
    "without a type": {"untyped": SPECIFIED}, "below": {"options": {"a": {"b": [SPECIFIED]}}},
    "in a list": {"kinds": ["trap.Model"]}, "a list as text": {"kinds": "[trap.Model]"},
    "a field": {"sizes": {"layer": "trap.Model"}}, "a dataclass": {"sizes": SPECIFIED},
    "a file": {"sizes": "trap.yaml"}, "a file of a class": {"loss": "trap.yaml"},
    "a function of Python": {"optimizer": "os.system"}, "a dotted name": {"optimizer.class_path": "trap.Model"},
    "beside": {"class_path": "trap.Model"}, "as others": {"dict_kwargs": {"loss": SPECIFIED}},
    "of a known class": {"loss": {"class_path": f"{HERE}.Loss", "init_args": {"inner": SPECIFIED}}},
    "a known optimizer's": {"optimizer": {"class_path": "lightning_asyncpp.optim.ErrorFeedback",
                                          "init_args": {"base": "trap.call"}}},
    "through our package": {"loss": {"class_path": "lightning_asyncpp.cli.trap.Model"}},
    "a module of ours": {"loss": {"class_path": "lightning_asyncpp.tools.doctor.trial.Small"}},
    "a tensor": {"anything": torch.ones(2)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "subcommand", "cls"),
    [
        (values, *(("validate", "Passing") if number % 2 else ("fit", "Typed")))
        for number, values in enumerate(HOSTILE.values())
    ],
    ids=HOSTILE,
)
def test_what_a_checkpoint_names_is_not_imported(
    values: dict[str, Any], subcommand: str, cls: str, trap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused by its name, with what to do."""
    typed(cls, **values)
    before = set(sys.modules)
    printed = refusal(capsys, *of_typed(f"--model.loss={HERE}.Loss", cls=cls, subcommand=subcommand))
    assert not trap.exists()
    assert not {name for name in set(sys.modules) - before if name.startswith(("trap", "lightning_asyncpp.tools"))}
    assert "asyncpp: error: --ckpt_path x.ckpt: a checkpoint is data" in printed
    assert f"\n  - {next(iter(values))}" in printed
    assert "Give them in the recipe or on the command line (--model.init_args.NAME)" in printed


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_class_is_not_imported(
    subcommand: str, sharded: bool, trap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(_class_path="trap.Model")
    printed = refusal(capsys, *asked(subcommand))
    assert f"model.class_path: '{GPTModule.__module__.partition('.')[0]}.GPTModule' was asked for" in printed
    assert "and the checkpoint has 'trap.Model'" in printed
    assert not trap.exists()


def test_what_is_compiled_is_the_recipes(
    trap: Path,
    folder: Path,
    model: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A compiler is a program, and a checkpoint's options could name any."""
    options = {"options": {"cpp.cxx": [None, str(folder / "program")]}}
    for name, value in (("compile_blocks", options), ("initial_weights", "there"), ("optimizer", "trap.call")):
        checkpoint(**{name: value})
        for subcommand in ("fit", "validate"):
            printed = refusal(capsys, *asked(subcommand))
            assert f"\n  - {name}: GPTModule saves none" in printed
    checkpoint(compile_blocks=options)
    arguments = model(*asked("fit", "--model.init_args.compile_blocks=true"))["init_args"]
    assert arguments["compile_blocks"] is True
    checkpoint(compile_blocks=False, initial_weights=None, activation_checkpointing="none")
    assert model(*asked("fit"))["init_args"]["compile_blocks"] is False
    assert not trap.exists()


ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5, "betas": [0.8, 0.9]}}
FEEDBACK = {"class_path": "lightning_asyncpp.optim.ErrorFeedback", "init_args": {"base": ADAMW, "strength": 2.0}}


def test_a_run_gets_back_what_it_was_begun_with(model: Any) -> None:
    """Optimizers and layers of torch and of this package, texts that only look like names, and numbers."""
    layer = {"class_path": "torch.nn.CrossEntropyLoss", "init_args": {"label_smoothing": 0.1, "reduction": "sum"}}
    plain = {"anything": {"a": [1, "os.system"]}, "untyped": "a.b", "options": {"x": "c.d", "y": [1.5, None, True]},
             "name": "run.of.today", "rates": [1.0, 2.0], "texts": {"a": "b.c"},
             "sizes": {"width": 7, "names": ["a.b"]}}  # fmt: skip
    for optimizer in (ADAMW, FEEDBACK):
        for cls in ("Typed", "Passing"):
            typed(cls, optimizer=optimizer, loss=layer, **plain)
            found = model(*of_typed(cls=cls, subcommand="validate"))["init_args"]
            assert found["optimizer"]["class_path"] == optimizer["class_path"], cls
            assert found["loss"]["init_args"]["label_smoothing"] == 0.1
            assert (found["name"], found["anything"], found["untyped"]) == ("run.of.today", plain["anything"], "a.b")
            assert found["sizes"]["width"] == 7
    assert (
        model(*of_typed("--model.name=run.of.today", cls=cls))["init_args"]["optimizer"]["class_path"]
        == found["optimizer"]["class_path"]
    )


GIVEN = [
    [],
    [f"--model.loss={HERE}.Loss", "--model.loss.inner=torch.nn.ReLU", "--model.kind=torch.nn.GELU"],
    ["--optimizer=AdamW", "--optimizer.lr=0.5", "--model.either=torch.nn.ReLU", "--model.anything=[1, a.b]"],
    [f"--model.kinds=[{HERE}.Loss]", f"--model.sizes.layer={HERE}.Loss", "--model.texts={a: b.c}"],
    ["--optimizer=lightning_asyncpp.optim.ErrorFeedback", "--optimizer.base=lightning_asyncpp.optim.MuonAdamW"],
]


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        pytest.param(cls, given, marks=[pytest.mark.slow] if bool(number % 2) is (cls == "Typed") else [])
        for cls in ("Typed", "Passing")
        for number, given in enumerate(GIVEN)
    ],
    ids=str,
)
def test_a_run_goes_on_with_the_arguments_that_it_was_begun_with(
    cls: str, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LightningCLI saves them."""
    saved: list[dict[str, Any]] = []

    def stop(cli: AsyncppCLI) -> NoReturn:
        cli._dump_config()
        saved.append(cli.config_dump["model"])
        raise InterruptedError

    monkeypatch.setattr(AsyncppCLI, "before_instantiate_classes", stop)
    arguments = ["fit", *BORING, "--model", f"{HERE}.{cls}", *given]
    with pytest.raises(InterruptedError):
        run(arguments)
    typed(cls, **saved[0]["init_args"])
    with pytest.raises(InterruptedError):
        run([*arguments, "--ckpt_path", "x.ckpt"])
    assert saved[0] == saved[1]


def test_what_the_recipe_names_too_is_taken(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed(loss={"class_path": f"{HERE}.Loss", "init_args": {"scale": 3.0}}, kind="torch.nn.modules.activation.ReLU")
    assert f"loss: it names '{HERE}.Loss'" in refusal(capsys, *of_typed())
    typed(loss={"class_path": f"{HERE}.Loss", "init_args": {"scale": 3.0}})
    assert f"loss: it names '{HERE}.Loss'" in refusal(capsys, *of_typed())
    found = model(*of_typed(f"--model.loss={HERE}.Loss"))["init_args"]
    assert found["loss"]["init_args"]["scale"] == 3.0


def test_texts_that_stay_texts_may_hold_escapes(model: Any) -> None:
    text = 'say: "a\\tb"'
    typed(name=text, texts={"a": text})
    found = model(*of_typed(subcommand="validate"))["init_args"]
    assert (found["name"], found["texts"]) == (text, {"a": text})


def test_a_class_may_have_two_names(model: Any) -> None:
    checkpoint(_class_path="lightning_asyncpp.trainer.gpt_module.GPTModule", decay="constant")
    assert model(*asked("fit"))["init_args"]["decay"] == "constant"


def test_who_trusts_a_file_says_so(model: Any) -> None:
    typed(kind="torch.nn.GELU")
    assert model(*of_typed("--weights_only=false", subcommand="validate"))["init_args"]["kind"] is nn.GELU


def test_removed_arguments_are_looked_for_in_what_is_imported_alone(trap: Path) -> None:
    before = set(sys.modules)
    for class_path in ("lightning_asyncpp.tools.doctor.trial.Small", "lightning_asyncpp.cli.trap.Model"):
        checkpoint(others={"class_path": class_path, "init_args": {"x": 1}})
        assert saved_hyper_parameters("x.ckpt")["others"]["init_args"] == {"x": 1}
    assert not trap.exists()
    assert "lightning_asyncpp.tools.doctor.trial" not in set(sys.modules) - before


def with_weights(**changed: Any) -> None:
    weights = {f"model.{name}": tensor for name, tensor in GPT(GPTConfig(**SIZES)).state_dict().items()}
    values = hyper_parameters(**changed)
    torch.save(
        {"state_dict": weights, "pytorch-lightning_version": L.__version__, "hyper_parameters": values,
         "datamodule_hyper_parameters": {"source": "trap.Model", "_class_path": "trap.Model"}, "tokenizer": "byte"},
        "x.ckpt",
    )  # fmt: skip


def test_commands_that_read_models_run_nothing(trap: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_weights(_class_path="trap.Model", optimizer="trap.call", compile_blocks=SPECIFIED, _instantiator="trap.call")
    for command in (
        ["checkpoint", "info", "x.ckpt"], ["checkpoint", "verify", "x.ckpt"], ["export", "x.ckpt", "--output", "hf"],
        ["checkpoint", "convert", "x.ckpt", "y.ckpt", "--to", "sharded"],
        ["generate", "y.ckpt", "--prompt", "a", "--max-new-tokens", "2"],
    ):  # fmt: skip
        main(command)
    with_weights(config=SPECIFIED)
    for command in (["generate", "x.ckpt", "--prompt", "a"], ["evaluate", "x.ckpt"]):
        with pytest.raises(SystemExit):
            main(command)
        assert "holds the config of another model" in capsys.readouterr().err
    assert not trap.exists()


@pytest.mark.parametrize(
    "values",
    [{"optimizer": "trap.call"}, {"optimizer": SPECIFIED}, {"compile_blocks": {"a": SPECIFIED}},
     {"config": SPECIFIED}, {"config": "trap.yaml"}, {"_class_path": "trap.Model"}, {"_instantiator": "trap.call"},
     {"config": {**SIZES, "moe": SPECIFIED}}, {"decay": SPECIFIED}],
    ids=str,
)  # fmt: skip
def test_a_module_from_a_checkpoint(values: dict[str, Any], trap: Path) -> None:
    """Lightning reads hyper-parameters as recipes are read, and imports what they name."""
    with_weights(**values)
    if values.keys() <= GPTModule.never_from_a_checkpoint:
        loaded = GPTModule.load_from_checkpoint("x.ckpt")
        assert loaded.compile_blocks is False
        assert loaded.config == GPTConfig(**SIZES)
    else:
        with pytest.raises(ValueError, match=r"trap|class_path"):
            GPTModule.load_from_checkpoint("x.ckpt")
    assert not trap.exists()


def test_a_module_from_a_checkpoint_takes_what_it_is_given(trap: Path) -> None:
    with_weights(compile_blocks=SPECIFIED, decay="constant")
    loaded = GPTModule.load_from_checkpoint("x.ckpt", activation_checkpointing="block")
    assert (loaded.activation_checkpointing, loaded.decay, loaded.compile_blocks) == ("block", "constant", False)
    with Path("x.ckpt").open("rb") as file:
        loaded = GPTModule.load_from_checkpoint(file)
    assert (loaded.decay, loaded.compile_blocks) == ("constant", False)
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        loaded.load_from_checkpoint("x.ckpt")
    assert not trap.exists()


def test_what_is_given_in_place_of_what_is_refused(trap: Path) -> None:
    with_weights(config=SPECIFIED)
    with pytest.raises(ConfigurationError, match="give them to load_from_checkpoint if you know them"):
        GPTModule.load_from_checkpoint("x.ckpt")
    assert GPTModule.load_from_checkpoint("x.ckpt", config=SIZES).config == GPTConfig(**SIZES)
    assert not trap.exists()


def test_data_from_a_checkpoint(trap: Path) -> None:
    with_weights()
    content = torch.load("x.ckpt", weights_only=True)
    for values in ({"_class_path": "trap.Model"}, {"tokenizer": SPECIFIED}, {"patterns": SPECIFIED}):
        known = {"_class_path": "lightning_asyncpp.data.TextDataModule", "source": "text"}
        known |= {"_instantiator": "lightning.pytorch.cli.instantiate_module", **values}
        torch.save({**content, "datamodule_hyper_parameters": known}, "x.ckpt")
        with pytest.raises(Exception, match=r"trap|patterns|tokenizer"):
            TextDataModule.load_from_checkpoint("x.ckpt")
        assert not trap.exists()
