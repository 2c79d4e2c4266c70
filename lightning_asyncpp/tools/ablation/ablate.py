"""``asyncpp ablate``: trains a grid of optimizers, learning rates, delays and corrections, and compares them."""

from __future__ import annotations

import fnmatch
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from jsonargparse import Namespace

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.recipe_names import recipe_path
from lightning_asyncpp.tools.ablation.recipe.cell_config import LEFT_OUT
from lightning_asyncpp.tools.ablation.recipe.check import find_problems
from lightning_asyncpp.tools.ablation.recipe.recipe import Recipe, read_recipe
from lightning_asyncpp.tools.ablation.recipe.rows import Plan, RowRecipe, make_rows, most_cells, with_leaders
from lightning_asyncpp.tools.ablation.run.conditions import gpu_problems, mixture, name_of, slots, versions
from lightning_asyncpp.tools.ablation.run.training_folders import Table, read_published
from lightning_asyncpp.tools.ablation.run.training_runner import Report, Runner, duration, seconds_left
from lightning_asyncpp.tools.parsers import ablate_parser


class StoppedError(BaseException):
    """The runner was asked to stop by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``asyncpp ablate RECIPE ...``.

    Raises:
        SystemExit: 2 for wrong arguments or a wrong recipe, 1 if a training failed or a file cannot be read or
            written, 128 + the signal that stopped it.
    """
    if sys.platform == "win32":
        raise SystemExit("asyncpp ablate: error: it runs on Linux and macOS only")
    arguments = ablate_parser().parse_args(list(sys.argv[1:] if argv is None else argv))
    gpus = [gpu.strip() for gpu in (arguments.gpus or "").split(",") if gpu.strip()]
    try:
        recipe = _checked(arguments, gpus)
        rows = make_rows(recipe)
        chosen = _only(rows, arguments.only)
        output = recipe.output if arguments.output is None else Path(arguments.output)
        published = {} if arguments.published is None else read_published(Path(arguments.published))
        table = Table(recipe, rows, (output / recipe.name).resolve(), published)
        table.check_recipe()
        environments = slots(arguments.workers, arguments.threads, gpus)
        if arguments.dry_run:
            _print_plan(table, chosen, len(environments))
            _warn_of_mixture(table, gpus, arguments.threads)
            return
        with _locked(table.folder.parent):
            table.keep_recipe()
            _warn_of_mixture(table, gpus, arguments.threads)
            failed = _run(table, chosen, environments, "gpu" if gpus else "cpu")
    except ConfigurationError as error:
        print(f"asyncpp ablate: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"asyncpp ablate: error: {error} (--output says where results are written)", file=sys.stderr)
        raise SystemExit(1) from None
    if failed:
        raise SystemExit(1)


def _checked(arguments: Namespace, gpus: Sequence[str]) -> Recipe:
    """Return the recipe.

    Raises:
        ConfigurationError: with everything that is wrong with the recipe and the arguments.
    """
    recipe, problems = read_recipe(Path(recipe_path(arguments.recipe)))
    if gpus and arguments.workers is not None:
        problems.append(f"--workers={arguments.workers}: with --gpus there is one training per GPU named; leave it out")
    if arguments.gpus is not None and not gpus:
        problems.append(f"--gpus={arguments.gpus!r}: names no GPU; give for example --gpus 0,1")
    problems += _gpu_problems(gpus, recipe)
    if recipe is not None:
        problems += find_problems(recipe)
    if recipe is None or problems:
        raise ConfigurationError.from_problems(problems)
    return recipe


def _gpu_problems(gpus: Sequence[str], recipe: Recipe | None) -> Iterator[str]:
    wanted = recipe is not None and dict(recipe.base.get("trainer") or {}).get("accelerator")
    if not gpus and wanted in ("gpu", "cuda"):
        yield f"the base recipe has accelerator: {wanted}; say on which GPUs with --gpus, or remove it to use the CPU"
    if gpus:
        yield from gpu_problems(gpus)


def _only(rows: Sequence[RowRecipe], pattern: str | None) -> list[RowRecipe]:
    chosen = with_leaders(rows, lambda row: pattern is None or fnmatch.fnmatchcase(row.name, pattern))
    if not chosen:
        names = ", ".join(row.name for row in rows)
        raise ConfigurationError(f"--only={pattern!r}: matches no row; the rows are {names}")
    return chosen


def _warn_of_mixture(table: Table, gpus: Sequence[str], threads: int) -> None:
    pending = table.plan().pending
    now = versions(name_of(gpus), threads) if pending else {}
    if message := mixture([result.versions for result in table.results.values()], now):
        print(f"asyncpp ablate: warning: {message}.", file=sys.stderr)


def _print_plan(table: Table, rows: Sequence[RowRecipe], at_once: int) -> None:
    recipe = table.recipe
    _print_left_out(recipe)
    plan = table.plan(rows)
    pending = set(plan.pending)
    for row in rows:
        cells = [cell for cell in plan.cells if cell.row == row.key]
        done = sum(cell not in pending for cell in cells)
        lrs = (
            "lr of the uncorrected row" if row.correction.same_lr else "lr " + " ".join(f"{x:g}" for x in row.grid.lrs)
        )
        most = most_cells(row, recipe.seeds, recipe.lr_extensions)
        print(f"{row.name}: {lrs}, seeds {' '.join(map(str, recipe.seeds))}; {done} done, at most {most} runs")
    searches = sum(len(row.grid.lrs) for row in rows if not row.correction.same_lr)
    most = sum(most_cells(row, recipe.seeds, recipe.lr_extensions) for row in rows)
    done = len(plan.cells) - len(plan.pending)
    print(f"{len(rows)} rows; {searches} runs to search the learning rates; at most {most} runs in total; {done} done")
    if left := seconds_left(plan, table.results, at_once):
        print(f"about {duration(left)} left with {at_once} at once")
    print(f"results: {table.folder}")


def _print_left_out(recipe: Recipe) -> None:
    trainer = recipe.base.get("trainer") or {}
    given = [key for key in LEFT_OUT if trainer.get(key)]
    if given:
        print(f"left out of {recipe.base_path.name}: {', '.join(f'trainer.{key}' for key in given)}")


def _run(table: Table, rows: Sequence[RowRecipe], environments: Sequence[dict[str, str]], accelerator: str) -> bool:
    """Run, report, and say how it ended; whether anything failed."""
    at_once, threads = len(environments), environments[0]["OMP_NUM_THREADS"]
    print(f"{table.folder}: {len(rows)} rows, {at_once} runs at once on the {accelerator.upper()}, threads: {threads}")
    _print_left_out(table.recipe)
    report = Report(at_once, table.results)
    runner = Runner(table, rows, environments, accelerator, report)
    try:
        with _stoppable():
            plan = runner.run()
            trouble = runner.trouble or _report(table.folder)
    except (KeyboardInterrupt, StoppedError) as stop:
        report.close()
        number = stop.number if isinstance(stop, StoppedError) else signal.SIGINT
        print(f"Stopped. {len(table.results)} runs are kept; the same command goes on with the others.", flush=True)
        raise SystemExit(128 + number) from None
    finally:
        report.close()
    _print_end(table, runner, plan)
    if trouble:
        print(f"asyncpp ablate: error: {trouble}", file=sys.stderr)
    return bool(runner.failures or trouble)


def _report(folder: Path) -> str:
    """Write the tables and plots; say why not."""
    from lightning_asyncpp.tools.ablation.report.__main__ import write_report

    try:
        write_report(folder)
    except OSError as error:
        return f"the report cannot be written: {error}"
    return ""


def _print_end(table: Table, runner: Runner, plan: Plan) -> None:
    for row in runner.rows:
        if plan.chosen.get(row.key, 0.0) is None:
            print(f"{row.name}: every learning rate diverged; add lower ones to its list")
    print(f"Tables and plots: {table.folder}", flush=True)
    if runner.gave_up:
        print(runner.gave_up, file=sys.stderr)
    if runner.failures:
        print(f"{len(runner.failures)} runs failed; the same command tries them again:", file=sys.stderr)
        for failure in runner.failures:
            print(f"  {failure.name}: {failure.log}", file=sys.stderr)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other runners out; the lock ends with this process, however that ends."""
    import fcntl  # not on Windows

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(
                f"{folder} is in use by another `asyncpp ablate`{_holder(file)}; wait for it, or give another --output"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _holder(file: TextIO) -> str:
    file.seek(0)
    process = file.read().strip()
    return f" (process {process})" if process else ""


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let a signal to end, or the loss of the terminal, stop the block as an interrupt from the keyboard does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # `nohup` has it ignored
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
