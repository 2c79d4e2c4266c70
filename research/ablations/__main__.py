"""Run the grid of a recipe, or what is missing of it, and write its table and pictures."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from research.ablations.recipe import Arm, Recipe
from research.ablations.report import write_report
from research.ablations.rows import UNCORRECTED
from research.ablations.runner import run, slots
from research.ablations.table import Table


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.ablations", description=__doc__)
    parser.add_argument("recipe", type=Path, help="such as research/ablations/tied.yaml")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/ablations"), help="folder of all tables and trainings"
    )
    parser.add_argument("--workers", type=int, help="trainings at once (default: one per core and thread)")
    parser.add_argument("--threads", type=int, default=1, help="threads of every training")
    parser.add_argument("--gpus", default="", help="such as 0,1: one training at once on each; 0,0 for two on one")
    parser.add_argument("--only", default="*", help="rows to run, such as 'AdamW*'; --dry-run lists them")
    parser.add_argument("--fresh", action="store_true", help="run what is published, too")
    parser.add_argument("--dry-run", action="store_true", help="say what is done and what is missing, and run nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m research.ablations``; exit with 1 if a training failed."""
    arguments = parser().parse_args(argv)
    gpus = [gpu for gpu in arguments.gpus.split(",") if gpu]
    workers = arguments.workers or max(1, (os.cpu_count() or 1) // arguments.threads)
    table = Table(Recipe.read(arguments.recipe), arguments.output, arguments.fresh)
    arms = _only(table, arguments.only)
    if arguments.dry_run:
        return _print_plan(table, arms)
    failed = run(table, arms, slots(workers, arguments.threads, gpus), "gpu" if gpus else "cpu")
    if table.runs:
        write_report(table.folder)
        print(f"Table and pictures: {table.folder}")
    if failed:
        sys.exit(f"{len(failed)} trainings failed; the same command tries them again.")


def _only(table: Table, pattern: str) -> list[Arm]:
    """Return the wanted rows, and those whose learning rate they use."""
    wanted = [arm for arm in table.arms.values() if fnmatch.fnmatchcase(arm.row.name, pattern)]
    leaders = {arm.row._replace(correction=UNCORRECTED) for arm in wanted if arm.same_lr}
    return [arm for arm in table.arms.values() if arm in wanted or arm.row in leaders]


def _print_plan(table: Table, arms: Sequence[Arm]) -> None:
    plan, missing = table.plan(arms)
    for arm in arms:
        left = [key for key in missing if key.row == arm.row]
        needed = sum(key.row == arm.row for key in plan.needed)
        lr = plan.chosen.get(arm.row)
        state = "learning rate not chosen yet" if arm.row not in plan.chosen else f"learning rate {lr}"
        print(f"{arm.row.name}: {needed - len(left)} of {needed} done, {state}")
    print(f"{len(missing)} trainings to run now, {plan.waiting} once learning rates are chosen")


if __name__ == "__main__":
    main()
