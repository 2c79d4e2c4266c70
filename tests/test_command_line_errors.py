"""What the command says where it cannot do what it was asked for: the cause, shortly, and nothing is spent before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
from docstring_parser import parser
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from lightning_asyncpp import GPTModule, cli
from lightning_asyncpp.cli import TOOLS, main
from lightning_asyncpp.errors import PeerLostError
from lightning_asyncpp.lightning_cli.command import read_configuration

ROOT = Path(__file__).parents[1]
RECIPE = ["--config", str(ROOT / "recipes/quickstart_moe.yaml")]


class Untidy(L.LightningModule):
    """A user's own module, which fails in a place that only a traceback tells."""

    def __init__(self) -> None:
        super().__init__()
        self.number = int("seven")


class Built(GPTModule):
    """A user's own module, which alone knows how its network is made."""

    def build_model(self) -> nn.Module:
        return super().build_model()


def refused(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--model.init_args.config.moe.top_k=50"], [r"moe.top_k=50: must be from 1 to num_experts=8"]),
        (
            ["--model.init_args.config.num_heads=3", "--model.init_args.config.moe.top_k=50"],
            ["num_heads=3", "num_kv_heads=2", "moe.top_k=50: must be from 1 to num_experts=8"],
        ),
        (["--data.init_args.val_fraction=1"], ["val_fraction=1"]),
    ],
    ids=["one problem", "three problems", "data"],
)
def test_what_a_class_refuses_is_all_that_is_printed(
    arguments: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused("fit", *RECIPE, *arguments) == 2
    printed = capsys.readouterr().err
    said = printed[printed.index("asyncpp: error: ") :]
    assert all(re.search(message, said) for message in messages), printed
    assert "Traceback" not in printed
    assert len(said.splitlines()) <= 1 + len(messages)


def test_data_that_cannot_be_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is only known once training begins."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "latin.txt").write_bytes(b"a text \xff " * 1000)
    (tmp_path / "texts" / "other.txt").write_text("a text " * 1000)
    given = ["--data.init_args.source", str(tmp_path / "texts"), "--data.init_args.cache_dir", str(tmp_path / "cache")]
    given += ["--trainer.devices", "1", "--trainer.logger", "false", "--trainer.default_root_dir", str(tmp_path)]
    assert refused("fit", *RECIPE, *given) == 2
    assert re.search(r"asyncpp: error: .*latin.txt is not UTF-8", said := capsys.readouterr().err), said
    assert "Traceback" not in said


def test_the_mistake_of_another_class_keeps_its_own_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^invalid literal for int\(\) with base 10: 'seven'$") as caught:
        main(["fit", *RECIPE, "--model", "tests.test_command_line_errors.Untidy"])
    assert caught.traceback[-1].name == "__init__"
    assert caught.value.__suppress_context__


def test_a_name_cut_short_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("fit", *RECIPE, "--trainer.max_step=3") == 2
    assert "there is no 'trainer.max_step'; did you mean trainer.max_steps?\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "lists", "lacks"),
    [
        (["--help"], [f"\n  {name} " for name in ("fit", "predict", *TOOLS)], ["--trainer.max_steps"]),
        (["fit", "--help"], ["--trainer.max_steps", "--trace", "--model", "--ckpt_path"], ["--trainer.min_epochs"]),
        (["validate", "--help"], ["--trainer.strategy", "--ckpt_path", "asyncpp validate"], ["--trace"]),
        (["validate", "--help=full"], ["--trainer.min_epochs", "--model", "--ckpt_path"], ["    predict "]),
    ],
)
def test_help_is_of_what_was_asked_for(
    arguments: list[str], lists: list[str], lacks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(*arguments) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in lists)
    assert not any(text in printed for text in lacks)


def test_fields_of_dataclasses_are_explained_and_their_sources_read_for_a_help_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a recipe, to read the sources takes longer than all the rest."""
    assert refused("fit", "--model.help", "lightning_asyncpp.GPTModule") == 0
    assert "Number of transformer blocks." in capsys.readouterr().out
    monkeypatch.setattr(parser, "add_attribute_docstrings", lambda *_: pytest.fail("the sources were read"))
    assert read_configuration(["fit", *RECIPE])["trainer"]["devices"] == 2


def test_an_unknown_subcommand_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("frob") == 2
    assert capsys.readouterr().err == "asyncpp: error: there is no subcommand 'frob'\n(`asyncpp --help` lists all)\n"
    assert refused("chek") == 2
    assert "there is no subcommand 'chek'; did you mean check?\n" in capsys.readouterr().err


def test_a_missing_subcommand_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused() == 2
    missing = capsys.readouterr()
    assert refused("--help") == 0
    assert (missing.out, missing.err) == ("", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([*RECIPE, "--trainr.max_steps=3"], "'trainr.max_steps'"),
        ([*RECIPE, "--trainer.max_step=3"], "'trainer.max_step'"),
    ],
)
def test_what_is_wrong_comes_first(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("fit", *arguments) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("asyncpp: error: ")
    assert reason in first
    assert last == "(`asyncpp fit --help=full` lists the options)"


@pytest.mark.parametrize("arguments", [["fit"], ["validate", "--ckpt_path", "x.ckpt"], ["check"]], ids=" ".join)
def test_a_missing_recipe_is_asked_for(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(*arguments) == 2
    assert "model (give a recipe; `asyncpp recipes` lists some" in capsys.readouterr().err


# A tool, what it cannot do without, and an option of its own that lacks the last letter.
SHORTENED = [
    ["check", *RECIPE, "--stage=2"],
    ["checkpoint", "info", "x.ckpt", "--jso"],
    ["doctor", "--timeou=3"],
    ["export", "x.ckpt", "--output", "x", "--devic=cpu"],
    ["generate", "x.ckpt", "--max-token=3"],
    ["import", "x", "--outpu=y"],
    ["plan", RECIPE[1], "--devic=cpu"],
    ["prepare", "x", "--output", "y", "--tokenizer", "byte", "--num-worker=0"],
    ["recipes", "--cop=quickstart"],
    ["trace", "x", "--htm=y"],
]


@pytest.mark.parametrize("arguments", SHORTENED, ids=lambda arguments: " ".join(a for a in arguments[:2]))
def test_tools_do_not_know_shortened_names_either(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(*arguments) == 2
    assert arguments[-1].partition("=")[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_tool_was_asked() -> None:
    assert {arguments[0] for arguments in SHORTENED} == set(TOOLS)


@pytest.mark.slow
def test_what_only_the_ranks_can_find_is_said_by_the_first_of_them(tmp_path: Path) -> None:
    """The others say that they ended for the same reason."""
    command = [str(Path(sys.executable).with_name("asyncpp")), "fit", *RECIPE]
    overrides = ["--trainer.strategy.init_args.partition=[1,2]", f"--trainer.default_root_dir={tmp_path}"]
    overrides += ["--model", f"{__name__}.Built"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, *overrides], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    message = r"partition=\[1, 2\] places 3 layers, but the model has 6"
    assert len(re.findall(rf"asyncpp: error: {message}.* must add up to that\n", ended.stderr)) == 1, ended.stderr
    others = re.findall(r"asyncpp: error: \[rank 1\] partition=\[1, 2\] places 3 .* \.\.\.\n", ended.stderr)
    assert len(others) == ended.stderr.count("[rank 1] partition") <= 1, ended.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_another_rank_is_all_that_is_printed(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, trace = "rank 2 (stage 0) failed first: ValueError: the user's own mistake", "    Traceback ..."

    def lost(arguments: object) -> None:
        raise PeerLostError(f"{line}\n\n{trace}")

    monkeypatch.setattr(cli, "run", lost)
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    assert refused("fit") == 1
    said = f"{line}\n\n{trace}" if rank == 0 else f"[rank 1] {line}"
    assert capsys.readouterr().err == f"asyncpp: error: {said}\n"
