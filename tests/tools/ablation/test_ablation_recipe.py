"""Recipes of ablations: what they mean, and every mistake at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp import GPTModule
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.ablation import ablate
from lightning_asyncpp.tools.ablation.recipe import cell_config as config
from lightning_asyncpp.tools.ablation.recipe.cell_config import cell_config, cell_name, digest_of, own_sources
from lightning_asyncpp.tools.ablation.recipe.check import find_problems, parameter_names, refusal
from lightning_asyncpp.tools.ablation.recipe.recipe import Recipe
from lightning_asyncpp.tools.ablation.recipe.rows import RowRecipe, make_rows
from lightning_asyncpp.tools.ablation.recipe.yaml_files import read_yaml, write_yaml
from tests.tools.ablation.small import ADAMW, EF, FIT, load_recipe, write_ablation


def load(folder: Path, **changes: Any) -> Recipe:
    return load_recipe(write_ablation(folder, text=False, **changes))


def problems(folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        load(folder, **changes)
    return str(error.value)


def test_rows_are_the_product_and_nothing_is_corrected_without_a_delay(tmp_path: Path) -> None:
    adamw = ADAMW | {"momentum": {"argument": "betas.0", "values": [0.5, 0.9]}}
    recipe = load(
        tmp_path, optimizers={"A": adamw, "B": ADAMW}, corrections={"none": None, "EF": EF},
        delays=[0, 1, {"delay": "pipedream", "stages": 4}],
    )  # fmt: skip
    names = [row.name for row in make_rows(recipe)]
    assert len(names) == len(set(names)) == 3 * (1 + 2 + 2)
    assert "B_delay0_EF" not in names
    assert "A_momentum0.5_delaypipedream-stages4_EF" in names


def test_what_is_left_out_has_the_documented_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, delays=None, output=None, lr_extensions=None)
    assert [delay.text for delay in recipe.delays] == ["0", "1"]
    assert (recipe.output, recipe.metric, recipe.lr_extensions) == (Path("runs/ablation"), "val_loss", 2)
    assert [c.config for c in recipe.optimizers[0].corrections] == [None]


def test_corrections_of_an_optimizer_replace_those_of_all(tmp_path: Path) -> None:
    own = ADAMW | {"corrections": {"none": None}}
    recipe = load(tmp_path, optimizers={"A": own, "B": ADAMW}, corrections={"none": None, "EF": EF}, delays=[1])
    assert [row.name for row in make_rows(recipe)] == ["A_delay1_none", "B_delay1_none", "B_delay1_EF"]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    told = problems(
        tmp_path, recipe="missing.yaml", lr_extension=1, seeds=[1, 1, -2], delays=[-1, 1, 1, {"stages": 2}],
        optimizers={
            "A": ADAMW | {"lr": []}, "B": ADAMW | {"lr": [-0.1]}, "C": {"lr": [0.1]}, "D": ADAMW | {"learning_rate": 1},
            "E": ADAMW | {"momentum": {"argument": "gammas.0", "values": [0.5]}}, "F/G": ADAMW,
            "H": ADAMW | {"init_args": {"lr": 0.1}},
        },
        corrections={"EF": EF | {"lr": "smae"}},
    )  # fmt: skip
    for wanted in (
        "missing.yaml cannot be read",
        "lr_extension: unknown key; did you mean 'lr_extensions'?",
        "seeds: names 1 twice",
        "seeds: -2 is not",
        "delays: -1 has no delay",
        "delays: names 1 twice",
        "delays: {'stages': 2} has no delay",
        "optimizers.A.lr: must be a list with at least one entry",
        "optimizers.B.lr: -0.1 is not a learning rate",
        "optimizers.C.class_path: is missing",
        "optimizers.D.learning_rate: unknown key",
        "optimizers.E.momentum.argument: gammas.0: there is no list 'gammas'",
        "'F/G' may have letters",
        "optimizers.H.init_args.lr: is set from the list `lr`",
        "corrections.EF.lr: must be 'same' or 'search', got 'smae'",
    ):
        assert wanted in told, f"{wanted}\nis not in\n{told}"


@pytest.mark.parametrize("lr", [[float("nan")], [float("inf")], ["fast"], [True], 0.1, [0.0]])
def test_only_lists_of_positive_finite_numbers_are_learning_rates(tmp_path: Path, lr: object) -> None:
    assert "optimizers.A.lr" in problems(tmp_path, optimizers={"A": ADAMW | {"lr": lr}})


def test_names_given_twice_are_refused(tmp_path: Path) -> None:
    path = write_ablation(tmp_path, text=False)
    path.write_text(path.read_text() + "\nname: again\n")
    with pytest.raises(ConfigurationError, match="'name' appears twice"):
        load_recipe(path)


def test_the_optimizer_alone_is_called_none(tmp_path: Path) -> None:
    wanted = "corrections.EF.lr: 'same' is that of the optimizer alone; add `none: null` to corrections"
    assert wanted in problems(tmp_path, corrections={"EF": EF | {"lr": "same"}})
    assert "corrections.none: must be null: it is the optimizer alone" in problems(tmp_path, corrections={"none": EF})
    told = problems(tmp_path, corrections={"plain": None, "EF": EF})
    assert "corrections.plain: is null: the optimizer alone is called `none`" in told


def test_the_optimizer_alone_may_be_left_out_where_gradients_are_delayed(tmp_path: Path) -> None:
    recipe = load(tmp_path, corrections={"EF": EF}, delays=[0, 1])
    assert [row.name for row in make_rows(recipe)] == ["AdamW_delay0_none", "AdamW_delay1_EF"]


VARIANTS = {"short": {"trainer.max_steps": 6}, "wide": {"model.init_args.config.dim": 32, "trainer.max_steps": 4}}


def test_variants_of_the_base_recipe_are_compared_each_within_itself(tmp_path: Path) -> None:
    recipe = load(tmp_path, variants=VARIANTS, delays=[0, 1])
    rows = make_rows(recipe)
    assert [row.name for row in rows] == [f"AdamW_{v}_delay{d}_none" for v in ("short", "wide") for d in (0, 1)]
    configs = [cell_config(recipe, row, 0.1, 1) for row in rows]
    assert [c["trainer"]["max_steps"] for c in configs] == [6, 6, 4, 4]
    assert [c["model"]["init_args"]["config"]["dim"] for c in configs] == [16, 16, 32, 32]
    assert recipe.base["trainer"]["max_steps"] == 12
    assert rows[0].key.group != rows[2].key.group


def test_a_run_of_a_variant_is_that_of_the_recipe_that_says_the_same(tmp_path: Path) -> None:
    def digest(recipe: Recipe) -> str:
        return digest_of(cell_name(recipe, make_rows(recipe)[0], 0.1, 1))

    varied = digest(load(tmp_path, variants={"short": {"trainer.max_steps": 6}}))
    recipe = load(tmp_path)
    assert digest(recipe) != varied
    write_yaml(tmp_path / "fit.yaml", FIT | {"trainer": FIT["trainer"] | {"max_steps": 6}, "data": recipe.base["data"]})
    assert digest(load_recipe(recipe.path)) == varied


def test_mistakes_in_variants_are_told(tmp_path: Path) -> None:
    told = problems(tmp_path, variants={"a": 3, "b": {"trainer.max_steps.now": 1}, "c d": {}})
    assert "variants.a: must map places in the base recipe to values, got 3" in told
    assert "variants.b: trainer.max_steps.now: what is before 'now' is 12" in told
    assert "variants: the name 'c d' may have letters" in told
    assert "variants: is missing or empty" in problems(tmp_path, variants={})
    recipe = load(tmp_path, variants={"good": {}, "bad": {"model.init_args.config.dimm": 32}})
    (problem,) = find_problems(recipe)
    assert re.match(r"variants\.bad: .*dimm", problem)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"lr_argument": "betas.7"}, "lr_argument: betas.7: there is a list of 2 entries before '7'"),
        ({"momentum": {"argument": "lr", "values": [0.5]}}, "momentum.argument: 'lr' is set from the list `lr`"),
    ],
)
def test_places_that_cannot_be_set_are_told(tmp_path: Path, changes: dict[str, Any], wanted: str) -> None:
    assert f"optimizers.A.{wanted}" in problems(tmp_path, optimizers={"A": ADAMW | changes})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"ckpt_path": "last.ckpt"}, "ckpt_path would resume one training in all of them"),
        ({"model": {"class_path": "M", "init_args": None}}, "model.init_args is None; make it a mapping"),
    ],
)
def test_a_base_recipe_that_no_grid_can_be_made_of(tmp_path: Path, changes: dict[str, Any], wanted: str) -> None:
    path = write_ablation(tmp_path, text=False)
    write_yaml(tmp_path / "fit.yaml", FIT | changes)
    with pytest.raises(ConfigurationError, match=wanted):
        load_recipe(path)


@pytest.mark.parametrize("name", ["cells", "lock"])
def test_a_table_cannot_take_the_place_of_common_files(tmp_path: Path, name: str) -> None:
    assert f"name: '{name}' is taken" in problems(tmp_path, name=name)


@pytest.mark.parametrize(
    ("optimizer", "correction", "wanted"),
    [
        (ADAMW, None, None),
        (ADAMW | {"init_args": {"weight_decay": -1.0}}, None, "Invalid weight_decay value: -1.0"),
        (ADAMW, EF, None),
        (ADAMW, EF | {"init_args": {"strength": -5.0}}, "strength must be .* got -5.0"),
        (ADAMW | {"class_path": "tests.tools.ablation.test_ablation_recipe.OnlyForTwo"}, None, None),
    ],
)
def test_values_that_a_class_refuses_are_known_without_a_training(
    optimizer: dict[str, Any], correction: dict[str, Any] | None, wanted: str | None, tmp_path: Path
) -> None:
    corrections = {"none": None} | ({"C": correction} if correction else {})
    grid = load(tmp_path, optimizers={"A": optimizer}, corrections=corrections).optimizers[0]
    told = refusal(grid.build(0.1, None, grid.corrections[-1]))
    assert told is None if wanted is None else re.search(wanted, told or "")


class OnlyForTwo(torch.optim.AdamW):
    """Cannot be built around whatever parameter; that is no reason to refuse it."""

    def __init__(self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.9), **more: Any) -> None:
        params = list(params)
        assert len(params) == 2
        super().__init__(params, lr, betas, **more)


def test_the_parser_of_fit_finds_wrong_classes_and_arguments_before_anything_runs(tmp_path: Path) -> None:
    recipe = load(
        tmp_path, optimizers={
            "A": ADAMW, "B": ADAMW | {"class_path": "torch.optim.AdamWW"},
            "C": ADAMW | {"init_args": {"wieght_decay": 0.1}}, "D": ADAMW | {"class_path": "torch.nn.Linear"},
            "E": ADAMW | {"momentum": {"argument": "betas.0", "values": [0.9, 1.5]}},
        },
        corrections={"none": None, "EF": EF | {"init_args": {"strenght": 1.0}}},
        delays=[1, {"delay": "pipedream"}, {"delay": 1, "stagess": 2}, {"delay": "pipedream", "stages": 4000}],
    )  # fmt: skip
    found = find_problems(recipe)
    for where, what in (
        ("optimizers.B", "there is no class 'torch.optim.AdamWW'"),
        ("optimizers.C", "wieght_decay"),
        ("optimizers.D", "no torch optimizer"),
        ("optimizers.E", "Invalid beta parameter at index 0: 1.5"),
        ("corrections.EF", "strenght"),
        ("delays: {'delay': 'pipedream'}", "stages"),
        ("delays: {'delay': 1, 'stagess': 2}", "stagess"),
        ("delays: {'delay': 'pipedream', 'stages': 4000}", "stages=4000 is more than the module has parameters ("),
    ):
        assert any(problem.startswith(where) and what in problem for problem in found), (where, found)
    assert len(found) == 8


def test_a_wrong_base_recipe_is_told_once_with_all_else_that_is_wrong(tmp_path: Path) -> None:
    recipe = load(tmp_path, optimizers={"A": ADAMW | {"class_path": "torch.optim.AdamWW"}}, delays=["late"])
    fit = read_yaml(tmp_path / "fit.yaml")
    fit["trainer"]["max_stepss"] = 3
    write_yaml(tmp_path / "fit.yaml", fit)
    base, optimizer, delay = find_problems(load_recipe(recipe.path))
    assert base.startswith("recipe: ")
    assert "max_stepss" in base
    assert "there is no class 'torch.optim.AdamWW'" in optimizer
    assert "delay='late' must be a number of updates" in delay


def test_a_wrong_place_of_the_seed_is_told_of_the_grid(tmp_path: Path) -> None:
    (problem,) = find_problems(load(tmp_path, seed_arguments=["data.init_args.sed"]))
    assert problem.startswith("seed_arguments: data.init_args.sed: ")


def test_a_wrong_correction_is_told_beside_a_wrong_optimizer(tmp_path: Path) -> None:
    wrong = {"class_path": "lightning_asyncpp.optim.ErrorFeedbak"}
    optimizers = {"A": ADAMW | {"class_path": "torch.optim.AdamWW"}}
    correction, optimizer = find_problems(
        load(tmp_path, optimizers=optimizers, corrections={"none": None, "EF": wrong})
    )
    assert correction.startswith("corrections.EF: there is no class 'lightning_asyncpp.optim.ErrorFeedbak'")
    assert optimizer.startswith("optimizers.A: ")


def test_where_modules_of_ones_own_are_found_is_told(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    fit = read_yaml(tmp_path / "fit.yaml")
    fit["model"]["class_path"] = "no_such_module.MyModule"
    write_yaml(tmp_path / "fit.yaml", fit)
    (problem,) = find_problems(load_recipe(recipe.path))
    assert "no_such_module" in problem
    assert "the folder that the command is called in" in problem


def test_the_parameters_of_a_module_are_known_without_training_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    names = parameter_names(FIT["model"])
    module = GPTModule(**FIT["model"]["init_args"])
    module.configure_model()
    assert names == [name for name, _ in module.named_parameters()]
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(GPTModule, "build_model", lambda self: 1 / 0)
    assert parameter_names(FIT["model"]) is None


def test_the_command_ends_with_all_problems_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_ablation(tmp_path, text=False, metricc="loss", optimizers={"A": ADAMW | {"class_path": "no.such"}})
    with pytest.raises(SystemExit) as end:
        ablate.main([str(path), "--gpus", ",", "--workers", "2"])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    for wanted in ("metricc: unknown key; did you mean 'metric'?", "there is no class 'no.such'", "names no GPU"):
        assert wanted in printed


def test_the_name_of_a_run_changes_with_all_that_decides_its_result(tmp_path: Path) -> None:
    def name(recipe: Recipe, lr: float = 0.1, seed: int = 1, row: int = 0) -> str:
        return cell_name(recipe, make_rows(recipe)[row], lr, seed)

    recipe = load(tmp_path, delays=[0, 1])
    first = name(recipe)
    assert name(load(tmp_path, delays=[0, 1], lr_extensions=3, output="elsewhere")) == first
    fit = read_yaml(tmp_path / "fit.yaml")
    others = [name(recipe, lr=0.2), name(recipe, seed=2), name(recipe, row=1), name(load(tmp_path, diverged_above=5.0))]
    fit["trainer"]["max_steps"] = 13
    write_yaml(tmp_path / "fit.yaml", fit)
    others.append(name(load_recipe(recipe.path)))
    assert len({first, *others}) == 6


def test_the_name_of_a_run_changes_with_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    names = set()
    for width, module in enumerate(("first", "second", "third")):
        (tmp_path / f"own_{module}.py").write_text(f"class Module:\n    width = {width}\n")
        names.add(tuple(own_sources({"model": {"class_path": f"own_{module}.Module"}}).values()))
    assert len(names) == 3
    fit = FIT | {"model": {"class_path": "own_first.Module", "init_args": {}}}
    recipe = load(tmp_path)
    write_yaml(tmp_path / "fit.yaml", fit)
    first = cell_name(load_recipe(recipe.path), row_of(recipe), 0.1, 1)
    monkeypatch.setattr(config, "own_sources", lambda _: {"own_first.Module": "another"})
    assert cell_name(load_recipe(recipe.path), row_of(recipe), 0.1, 1) != first


def test_installed_code_is_told_by_its_version_and_not_by_its_files() -> None:
    recipe = {
        "model": {"class_path": "lightning_asyncpp.GPTModule"},
        "optimizer": [{"class_path": "torch.optim.AdamW"}],
    }
    assert own_sources(recipe | {"data": {"class_path": "no.such.Data"}, "metric": {"class_path": "Short"}}) == {}
    assert list(own_sources({"a": [{"class_path": f"{__name__}.Something"}]})) == [f"{__name__}.Something"]


def test_a_module_that_takes_no_optimizer_is_told_how_to(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    write_yaml(
        tmp_path / "fit.yaml", FIT | {"model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}}
    )
    (problem,) = find_problems(load_recipe(recipe.path))
    assert "its module takes no optimizer: give its __init__ an argument `optimizer: OptimizerCallable`" in problem


def test_the_command_says_what_it_leaves_out_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ablate.main([str(write_ablation(tmp_path, text=False)), "--dry-run"])
    assert "left out of fit.yaml: trainer.callbacks" in capsys.readouterr().out


def test_a_run_sets_only_what_the_grid_is_about(tmp_path: Path) -> None:
    recipe = load(tmp_path, seed_arguments=["data.init_args.seed"], delays=[{"delay": "pipedream", "stages": 2}])
    made = cell_config(recipe, row_of(recipe), 0.01, 5)
    assert made["seed_everything"] == made["data"]["init_args"]["seed"] == 5
    assert made["trainer"]["strategy"] == {
        "class_path": "lightning_asyncpp.DelayedGradientStrategy",
        "init_args": {"delay": "pipedream", "stages": 2},
    }
    assert "callbacks" not in made["trainer"]
    assert made["trainer"]["max_steps"] == FIT["trainer"]["max_steps"]
    assert made["model"]["init_args"]["config"] == FIT["model"]["init_args"]["config"]
    assert recipe.base["trainer"]["callbacks"] == FIT["trainer"]["callbacks"]


def row_of(recipe: Recipe) -> RowRecipe:
    return make_rows(recipe)[0]


def test_numbers_and_texts_survive_yaml_as_the_parser_reads_them(tmp_path: Path) -> None:
    (tmp_path / "in.yaml").write_text("a: 1e-3\nb: '1e-3'\nc: 2024-01-01\nd: .5\ne: 1.0e+9\n")
    content = read_yaml(tmp_path / "in.yaml")
    assert content == {"a": 0.001, "b": "1e-3", "c": "2024-01-01", "d": 0.5, "e": 1e9}
    write_yaml(tmp_path / "out.yaml", content)
    assert read_yaml(tmp_path / "out.yaml") == content
