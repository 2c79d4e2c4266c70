"""``asyncpp trace RUN``: where the time of a recorded run went, as a table, and as pictures to look into."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_asyncpp.tools.parsers import trace_parser
from lightning_asyncpp.tools.text import write_json
from lightning_asyncpp.tools.trace.pictures import NEEDS_MATPLOTLIB, write_html, write_perfetto, write_png
from lightning_asyncpp.tools.trace.recorded_run import RecordedRun, TraceError, read_run
from lightning_asyncpp.tools.trace.run_summary import Summary, summarise
from lightning_asyncpp.tools.trace.run_table import table

Writer = Callable[[RecordedRun, Summary, Path], None]
_WRITERS: dict[str, Writer] = {
    "html": write_html,
    "png": write_png,
    "perfetto": write_perfetto,
    "json": lambda run, summary, path: write_json(str(path), summary.as_json()),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write what was asked for; a trace that breaks the promised staleness ends with code 1."""
    parser = trace_parser()
    arguments = parser.parse_args(argv)
    files = {name: Path(arguments[name]) for name in _WRITERS if arguments[name] is not None}
    _check(parser, files)
    try:
        run = read_run(Path(arguments.run)).between(arguments.from_mini_batch, arguments.to_mini_batch)
        summary = summarise(run)
        for name, path in files.items():
            _WRITERS[name](run, summary, path)
    except (TraceError, OSError) as error:
        print(f"asyncpp trace: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join([table(run, summary), *(f"{name}: {path}" for name, path in files.items())]))
    if summary.violated:
        raise SystemExit(1)


def _check(parser: ArgumentParser, files: Mapping[str, Path]) -> None:
    """End with all that keeps files from being written, before anything is read."""
    problems = [
        f"--{name} {path}: there is no folder {path.parent}" for name, path in files.items() if not path.parent.is_dir()
    ]
    problems += [f"--{name} {path} is a folder; name a file" for name, path in files.items() if path.is_dir()]
    if "png" in files and find_spec("matplotlib") is None:
        problems.append(NEEDS_MATPLOTLIB)
    if problems:
        parser.error("; ".join(problems))


if __name__ == "__main__":
    main()
