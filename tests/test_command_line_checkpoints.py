"""What the command makes of ``--ckpt_path``: whose model is trained or evaluated, and what is said of a broken file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_asyncpp import GPTModule
from lightning_asyncpp.cli import AsyncppCLI, main, run
from lightning_asyncpp.lightning_cli.resumed_model import saved_hyper_parameters
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.private_names import PrivateNameError
from lightning_asyncpp.storage.sharded import commit, new_target, shard_name, write_shard

SIZES = {"vocab_size": 256, "context_length": 32, "num_layers": 2, "dim": 16, "num_heads": 2}
GPT_MODULE = "lightning_asyncpp.GPTModule"
HERE = "tests.test_command_line_checkpoints"


class Other(L.LightningModule):
    """A user's own module, of which nothing may change."""

    def __init__(self, width: int = 3, rate: float = 0.1) -> None:
        super().__init__()


class Lenient(Other):
    """The same, but for its rate."""

    may_change_on_resume = ("rate",)


class _Read(Exception):  # noqa: N818  (no error)
    pass


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a recipe."""
    monkeypatch.chdir(tmp_path)
    model = {"class_path": GPT_MODULE, "init_args": {"config": SIZES, "warmup_steps": 1}}
    data = {"class_path": "lightning_asyncpp.data.TextDataModule", "init_args": {"source": "text"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    return tmp_path


def hyper_parameters(**changed: Any) -> dict[str, Any]:
    """As the command saves those of the recipe."""
    values = {"config": asdict(GPTConfig(**SIZES)), "warmup_steps": 1, "decay": "cosine", "total_steps": None}
    return {"_class_path": GPT_MODULE, "_instantiator": "lightning.pytorch.cli.instantiate_module", **values, **changed}


def checkpoint(**changed: Any) -> Path:
    torch.save({"state_dict": {}, "hyper_parameters": hyper_parameters(**changed)}, "x.ckpt")
    return Path("x.ckpt")


def asked(subcommand: str, *arguments: str, ckpt_path: Any = "x.ckpt", recipe: bool = True) -> list[str]:
    return [subcommand, *["--config", "recipe.yaml"][: 2 * recipe], "--ckpt_path", str(ckpt_path), *arguments]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr().err
    assert end.value.code == 2, printed
    assert "Traceback" not in printed
    return printed


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads arguments: the section of the model from which it would be made."""

    def stop(cli: AsyncppCLI) -> NoReturn:
        raise _Read(cli.config[cli.config["subcommand"]].model.as_dict())

    def read(*arguments: str) -> Any:
        with pytest.raises(_Read) as caught:
            run(arguments)
        return caught.value.args[0]

    monkeypatch.setattr(AsyncppCLI, "before_instantiate_classes", stop)
    return read


@pytest.mark.parametrize("sharded", [False, True])
def test_training_another_model_than_the_checkpoints_is_refused(
    capsys: pytest.CaptureFixture[str], sharded: bool
) -> None:
    """With every argument, and both values."""
    path = checkpoint()
    if sharded:
        content, path = torch.load(path, weights_only=True), Path("folder")
        target = new_target(path)
        commit(target, [write_shard(target, shard_name(0), {"weight": torch.ones(2)})], content, {})
    overrides = ["--model.init_args.config.num_layers=3", "--model.init_args.config.rope_base=5000"]
    printed = refusal(capsys, *asked("fit", *overrides, ckpt_path=path))
    lines = printed[printed.index("asyncpp: error: ") :].splitlines()
    assert lines[0].startswith(f"asyncpp: error: --ckpt_path {path} is of another model")
    assert lines[1:3] == [
        "  - model.init_args.config.num_layers: 3 was asked for, and the checkpoint has 2",
        "  - model.init_args.config.rope_base: 5000.0 was asked for, and the checkpoint has 10000.0",
    ]
    assert lines[3].startswith("Leave these arguments out")
    assert "--model.init_args.initial_weights" in lines[3]


def test_a_recipe_that_differs_is_refused_as_an_override_is(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(config=asdict(GPTConfig(**{**SIZES, "dim": 32})))
    assert "model.init_args.config.dim: 16 was asked for, and the checkpoint has 32" in refusal(capsys, *asked("fit"))


def test_experts_that_the_checkpoint_lacks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint()
    printed = refusal(capsys, *asked("fit", "--model.init_args.config.moe.num_experts=4"))
    assert "model.init_args.config.moe: {'num_experts': 4" in printed
    assert "and the checkpoint has None" in printed


def test_another_class_is_refused_alone(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint()
    printed = refusal(capsys, *asked("fit", "--model", f"{HERE}.Other", "--model.width=7"))
    assert f"model.class_path: '{HERE}.Other' was asked for, and the checkpoint has '{GPT_MODULE}'" in printed
    assert "width" not in printed
    assert "initial_weights" not in printed


def test_a_recipe_that_agrees_goes_on(model: Any) -> None:
    """What it leaves out is the checkpoint's; how the model is computed and begins is in none."""
    checkpoint(decay="constant", min_lr_ratio=0.3, config=asdict(GPTConfig(**SIZES, dropout=0.2)))
    arguments = model(*asked("fit", "--model.init_args.initial_weights=some", "--optimizer=AdamW"))["init_args"]
    assert arguments["config"]["num_layers"] == 2
    assert arguments["config"]["dropout"] == 0.2
    assert (arguments["decay"], arguments["min_lr_ratio"], arguments["warmup_steps"]) == ("constant", 0.3, 1)
    assert arguments["initial_weights"] == "some"
    assert arguments["optimizer"]["class_path"] == "torch.optim.AdamW"


@pytest.mark.parametrize("subcommand", ["fit", "validate"])
def test_the_schedule_is_the_users(model: Any, subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(warmup_steps=5, total_steps=10)
    arguments = model(*asked(subcommand, "--model.init_args.total_steps=20"))["init_args"]
    assert (arguments["warmup_steps"], arguments["total_steps"]) == (1, 20)
    assert "asyncpp:" not in capsys.readouterr().err


def test_a_class_says_what_may_change(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"_class_path": f"{HERE}.Lenient", "width": 3, "rate": 0.1}
    torch.save({"hyper_parameters": values}, "x.ckpt")
    lenient = ["--data", "lightning.pytorch.demos.boring_classes.BoringDataModule", "--model", f"{HERE}.Lenient"]
    arguments = model(*asked("fit", *lenient, "--model.rate=0.2", recipe=False))["init_args"]
    assert arguments == {"width": 3, "rate": 0.2}
    printed = refusal(capsys, *asked("fit", *lenient, "--model.rate=0.2", "--model.width=4", recipe=False))
    assert "model.init_args.width: 4 was asked for, and the checkpoint has 3" in printed
    assert "rate" not in printed[printed.index("asyncpp: error") :]


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_evaluating_takes_the_checkpoints_model_and_says_so(
    model: Any, subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint()
    arguments = model(*asked(subcommand, "--model.init_args.config.num_layers=3"))["init_args"]
    assert arguments["config"]["num_layers"] == 2
    assert capsys.readouterr().err.startswith(
        f"asyncpp: the checkpoint's own model is used by {subcommand}:\n"
        "  - model.init_args.config.num_layers: 3 was asked for, and the checkpoint has 2\n"
    )


def test_a_checkpoint_of_a_script_is_of_the_class_asked_for(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Which has not to take all that the script noted."""
    values = {name: value for name, value in hyper_parameters(note="of a script").items() if name[0] != "_"}
    torch.save({"hyper_parameters": values}, "x.ckpt")
    assert model(*asked("fit"))["init_args"]["decay"] == "cosine"
    assert "num_layers: 3 was asked for" in refusal(capsys, *asked("fit", "--model.init_args.config.num_layers=3"))


@pytest.mark.parametrize("ckpt_path", ["x.ckpt", "last", "best", "hpc", "registry:x", "other"])
def test_without_hyper_parameters_the_recipe_counts(model: Any, ckpt_path: str) -> None:
    """Also where the Trainer finds the file, or another strategy has a folder."""
    torch.save({"state_dict": {}}, "x.ckpt")
    Path("last").touch()
    Path("other").mkdir()
    arguments = asked("fit", "--model.init_args.config.num_layers=3", ckpt_path=ckpt_path)
    assert model(*arguments)["init_args"]["config"]["num_layers"] == 3


def truncated(path: Path) -> None:
    path.write_bytes(checkpoint().read_bytes()[:700])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (truncated, "broken is damaged or no checkpoint: its end is missing"),
        (
            lambda path: path.write_text("root:x:0:0:root:/root:/bin/bash\n"),
            "it does not begin as a file of torch does",
        ),
        (lambda path: path.write_text("nonsense"), "broken is damaged or no checkpoint: it does not begin as a file"),
        (lambda path: path.touch(), "broken is damaged or no checkpoint: it is empty"),
        (lambda path: torch.save([1], path), "broken is no checkpoint: it holds a list"),
        (lambda path: torch.save({"hyper_parameters": 3}, path), "broken is damaged or no checkpoint: its hyper-param"),
        (lambda path: torch.save({"hyper_parameters": {3: 4}}, path), "broken is damaged or no checkpoint: its hyper-"),
        (lambda path: torch.save({"x": Path()}, path), "broken cannot be read without running code that it may hold"),
        (lambda path: None, "there is no checkpoint "),
    ],
    ids=["truncated", "passwd", "nonsense", "empty", "list", "number", "no names", "code", "missing"],
)
@pytest.mark.parametrize("subcommand", ["fit", "validate"])
def test_a_file_that_cannot_be_read_is_named(
    write: Any, message: str, subcommand: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "broken")
    printed = refusal(capsys, *asked(subcommand, ckpt_path="broken"))
    assert printed.startswith("asyncpp: error: --ckpt_path: ")
    assert message in printed
    assert str(folder / "broken") in printed


def test_a_url_that_nobody_can_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: --ckpt_path nowhere://x: Protocol not known" in refusal(
        capsys, *asked("fit", ckpt_path="nowhere://x")
    )


def test_arguments_that_no_longer_exist_are_said_to_be_the_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(gone=3)
    assert "\n  - gone: GPTModule has no such argument\n" in refusal(capsys, *asked("fit"))


def test_values_that_no_longer_exist_are_said_to_be_the_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(decay="gone")
    assert "above are those of the checkpoint x.ckpt" in refusal(capsys, *asked("fit"))


def test_a_lightning_that_reads_checkpoints_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(LightningCLI, "_parse_ckpt_path")
    with pytest.raises(SystemExit) as end:
        main(asked("fit"))
    assert end.value.code == 1
    assert "_parse_ckpt_path" in capsys.readouterr().err
    monkeypatch.setenv("ASYNCPP_TRACEBACK", "1")
    with pytest.raises(PrivateNameError, match="_parse_ckpt_path"):
        main(asked("fit"))


def test_a_run_is_made_longer(tmp_path: Path) -> None:
    """With the rest of the other schedule."""
    (tmp_path / "text").mkdir()
    for index in range(8):
        (tmp_path / "text" / f"{index}.txt").write_text("some text\n" * 100)
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--trainer.max_epochs=-1"]
    saving = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.dirpath=."]
    data = ["--data.init_args.context_length=32", "--data.init_args.batch_size=2", "--data.init_args.val_fraction=0.3"]
    common = ["--config", "recipe.yaml", *trainer, "--trainer.limit_val_batches=0", *data, "--optimizer=AdamW"]
    saving += ["--trainer.callbacks.save_last=true", "--trainer.callbacks.every_n_train_steps=1"]
    common = [*common, *saving, "--trainer.enable_progress_bar=false", "--optimizer.lr=1.0"]
    main(["fit", *common, "--trainer.max_steps=2", "--model.init_args.total_steps=2"])
    main(["fit", *common, "--trainer.max_steps=4", "--model.init_args.total_steps=9", "--ckpt_path=last.ckpt"])
    content = torch.load("last.ckpt", weights_only=True)
    assert content["global_step"] == 4
    assert content["hyper_parameters"]["total_steps"] == 9
    module = GPTModule(GPTConfig(**SIZES), warmup_steps=1, total_steps=9)
    assert content["lr_schedulers"][0]["_last_lr"] == [module._learning_rate_factor()(4)]


def test_arguments_that_changed_nothing_and_are_no_more_are_left_out() -> None:
    muon = {"lr": 0.02, "newton_schulz": "quintic", "newton_schulz_scale": "frobenius"}
    base = {"class_path": "lightning_asyncpp.optim.MuonAdamW", "init_args": muon}
    feedback = {"base": base, "strength": 2.0, "anneal": False, "match_lr": False}
    optimizer = {"class_path": "lightning_asyncpp.optim.ErrorFeedback", "init_args": feedback}
    others = {"class_path": "mine.ErrorFeedback", "init_args": {"anneal": False}}
    checkpoint(optimizer=optimizer, others=[others])
    saved = saved_hyper_parameters("x.ckpt")
    left = {"base": {**base, "init_args": {"lr": 0.02}}, "strength": 2.0}
    assert saved["optimizer"] == {**optimizer, "init_args": left}
    assert saved["others"] == [others]
    feedback["anneal"] = muon["newton_schulz"] = True  # these meant something: the parser will name them
    checkpoint(optimizer=optimizer)
    kept = saved_hyper_parameters("x.ckpt")["optimizer"]["init_args"]
    assert kept["anneal"] is True
    assert kept["base"]["init_args"]["newton_schulz"] is True
