"""All wrong names and values of a recipe and a command line are told at once, each with what may have been meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_asyncpp.cli import read_configuration
from lightning_asyncpp.lightning_cli.mistakes import (
    Mistake,
    Mistaken,
    arguments_without,
    collecting,
    further,
    is_collecting,
    recipe_without_mistakes,
)

RECIPE = Path(__file__).parents[1] / "recipes/quickstart.yaml"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines between the first and the one on the help."""
    with pytest.raises(SystemExit, match="2"):
        read_configuration(["fit", *arguments])
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert last == "(`asyncpp fit --help=full` lists the options)"
    assert first == f"asyncpp: error: {len(lines)} problems:"
    return lines


def test_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of sections, of arguments and of classes, in lists as well, and values."""
    content = RECIPE.read_text()
    for right, wrong in (
        ("  devices: 2", "  devicess: 2"),
        ("micro_batches: 4", "micro_batchs: 4"),
        ("num_layers:", "num_layer:"),
        ("  max_steps: 300", "  max_steps: many"),
        ("lightning_asyncpp.PipelineMonitor", "lightning_asyncpp.PipelineMonitr"),
        ("max_new_tokens: 64", "max_new_tokens: some"),
        ("\ndata:\n", "\nsees_everything: 3\ndata:\n"),
    ):
        assert right in content
        content = content.replace(right, wrong)
    (tmp_path / "recipe.yaml").write_text(content)
    lines = told(capsys, str(tmp_path / "recipe.yaml"))
    for said in (
        "'trainer.devicess'; did you mean trainer.devices?",
        "has no argument 'micro_batchs'; did you mean micro_batches?",
        "'config.num_layer'; did you mean config.num_layers?",
        "--trainer.max_steps: expected int, got 'many'",
        "there is no Callback 'PipelineMonitr'; did you mean PipelineMonitor?",
        "--trainer.callbacks.max_new_tokens: expected int, got 'some'",
        "there is no option 'sees_everything'; did you mean seed_everything?",
    ):
        assert len([line for line in lines if said in line]) == 1, (said, lines)
    assert len(lines) == 7, lines


def test_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trainer.max_steps=many", "--lr", "3", "--optimizer.base.lrr", "3", "--data.batch_size", "big"]
    arguments += ["--max_step=-3", "--trainer.strategy", "async-pipline", "--seed_everything=-7"]
    assert told(capsys, str(RECIPE), *arguments) == [
        "  1. --trainer.max_steps: expected int, got 'many'",
        "  2. --model.optimizer.base: lightning_asyncpp.optim.MuonAdamW has no argument 'lrr'; did you mean lr?",
        "  3. --data.batch_size: expected int, got 'big'",
        "  4. there is no option --lr; did you mean --optimizer.lr?",
        "  5. there is no option --max_step; did you mean --trainer.max_steps?",
        "  6. --trainer.strategy: there is no strategy 'async-pipline'; did you mean async_pipeline or sync_pipeline?",
        "  7. --seed_everything: a seed is a whole number from 0 to 4294967295, got -7",
    ]


def test_what_is_missing_since_it_was_taken_out_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_configuration(["fit", str(RECIPE), "--data", "TextDataModul"])
    said = capsys.readouterr().err
    assert said.startswith("asyncpp: error: --data: there is no LightningDataModule 'TextDataModul'; did you mean Text")
    assert said.count("\n") == 2, said


def test_a_help_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_configuration(["fit", str(RECIPE), "--trainer.max_steps=many", "--print_config"])
    assert capsys.readouterr().out == ""


def test_only_what_is_wrong_is_taken_out() -> None:
    """Of a list of classes the one that does not exist; between keys no class and its arguments count."""
    content = {
        "trainer": {"max_steps": "x", "callbacks": [{"class_path": "a.B", "init_args": {"c": 1, "d": 2}}, "a.E"]},
        "model": {"class_path": "M", "init_args": {"config": {"dim": 3, "dimm": 4}}},
    }
    known = [Mistake("", "trainer.max_steps"), Mistake("", "trainer.callbacks", "E"), Mistake("", "model.config.dimm")]
    with collecting([*known, Mistake("", "trainer.callbacks.d")]):
        assert recipe_without_mistakes(content) == {
            "trainer": {"callbacks": [{"class_path": "a.B", "init_args": {"c": 1}}]},
            "model": {"class_path": "M", "init_args": {"config": {"dim": 3}}},
        }
    assert not is_collecting()
    given = ["fit", "--trainer.max_steps", "-3", "-c", "x", "--model.init_args.config.dimm=4", "--trainer.callbacks+=E"]
    assert arguments_without(given, known) == ["fit", "-c", "x"]


def test_reading_again_ends() -> None:
    """Also where what is taken out is not what was complained of, or there is no end of mistakes."""
    first, count = Mistake("first", "a"), 0

    def read(_: object) -> None:
        nonlocal count
        count += 1
        raise Mistaken([Mistake(f"number {count}", "b")], "")

    def read_the_same(_: object) -> None:
        raise Mistaken([first], "")

    assert len(further([first], read)) == 19
    assert further([first], read_the_same) == []
    assert further([Mistake("nobody knows where")], read) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "mine.yaml is empty: a recipe has sections, such as `trainer:`"),
        ("- a", "mine.yaml holds ['a']: a recipe has sections"),
        ("hello", "mine.yaml holds 'hello': a recipe has sections"),
        ("trainer: {max_steps: [}", "mine.yaml is no YAML that can be read: "),
    ],
)
def test_a_file_that_is_no_recipe_is_named(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        read_configuration(["fit", str(RECIPE), str(tmp_path / "mine.yaml")])
    assert f"asyncpp: error: {said}" in capsys.readouterr().err
