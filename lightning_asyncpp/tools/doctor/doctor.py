"""``asyncpp doctor``: is this installation right, and what can it do? One report, with GPUs or without."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from lightning_asyncpp.tools.doctor.doctor_report import as_json, as_markdown, line, summary
from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.parts import INSTALLATION, PARTS, Part, Result, examine
from lightning_asyncpp.tools.doctor.task import MACHINE, Finding, worst
from lightning_asyncpp.tools.parsers import doctor_parser
from lightning_asyncpp.tools.processes import KILL_SECONDS, sigterm_raises


def main(argv: Sequence[str] | None = None) -> None:
    """Examine, and write the report; what failed ends with code 1."""
    parser = doctor_parser()
    own = parser.parse_args(argv)
    if problem := _problem(own):
        parser.error(problem)
    chosen = [part for part in PARTS if part is INSTALLATION or part.name in own.parts]
    limit = sum(part.limit + KILL_SECONDS for part in chosen)
    _say(f"Examining {', '.join(part.name for part in chosen)}; this ends within {limit:.0f} s.")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-", ignore_cleanup_errors=True) as name, sigterm_raises():
        try:
            examine(chosen, Path(name), own.quick, results, _Progress())
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
        finally:
            machine_file = Path(name) / MACHINE
            machine = Machine.load(machine_file) if machine_file.exists() else None
            is_written = _write(results, machine, own.quick, Path(own.output))
    if not is_written or worst(result.status for result in results) == "failed":
        raise SystemExit(1)


def _write(results: Sequence[Result], machine: Machine | None, quick: bool, folder: Path) -> bool:
    _say(f"\n{summary(results)}\n")
    texts = {"report.md": as_markdown(results, machine, quick)}
    texts["report.json"] = json.dumps(as_json(results, machine, quick), indent=2) + "\n"
    written = [folder / name for name, text in texts.items() if _is_written(folder / name, text)]
    if written:
        _say(f"The report: {', '.join(map(str, written))}; paste report.md into an issue")
    return len(written) == len(texts)


def _is_written(path: Path, text: str) -> bool:
    """Write a file, or say why that cannot be: what was found must not go with it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _say(f"{path} cannot be written ({error.strerror}): the table above is what is left, and this of report.md:\n")
        if path.suffix == ".md":
            _say(text)
        return False
    return True


def _say(text: str) -> None:
    """Print; where nobody reads any more, as behind ``| head``, the examination goes on for its report."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


class _Progress:
    """Prints findings as they come, under the name of their part."""

    def __init__(self) -> None:
        self._part: Part | None = None

    def __call__(self, part: Part, finding: Finding) -> None:
        if part is not self._part:
            self._part = part
            _say(f"{part.title}:")
        _say(line(finding))


def _problem(own: Namespace) -> str:
    """What is wrong with the arguments; empty if nothing."""
    names = [part.name for part in PARTS]
    if unknown := [name for name in own.parts if name not in names]:
        return f"--parts {' '.join(unknown)}: unknown; there are {', '.join(names)}"
    if Path(own.output).is_file():
        return f"--output {own.output} is a file: name a folder"
    try:
        Path(own.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--output {own.output}: no folder there can be made ({error.strerror})"
    return ""


if __name__ == "__main__":
    main()
