"""``asyncpp trace RUN``: where the time of a recorded run went, as a table, and as pictures to look into."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_asyncpp.tools.parsers import trace_parser
from lightning_asyncpp.tools.text import write_json
from lightning_asyncpp.tools.trace.pictures import write_html, write_perfetto
from lightning_asyncpp.tools.trace.recorded_run import RecordedRun, TraceError, read_run
from lightning_asyncpp.tools.trace.summary import Summary, summarise
from lightning_asyncpp.tools.trace.table import table

_WRITERS: dict[str, Callable[[RecordedRun, Summary, Path], None]] = {
    "html": write_html,
    "perfetto": write_perfetto,
    "json": lambda run, summary, path: write_json(str(path), summary.as_json()),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write what was asked for; a run that breaks its schedule's staleness ends with code 1."""
    arguments = trace_parser().parse_args(argv)
    files = {name: Path(arguments[name]) for name in _WRITERS if arguments[name] is not None}
    try:
        run = read_run(Path(arguments.run)).between(arguments.from_mini_batch, arguments.to_mini_batch)
        summary = summarise(run)
        for name, path in files.items():
            _WRITERS[name](run, summary, path)
    except (TraceError, OSError) as error:
        print(f"asyncpp trace: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join([table(run, summary), *(f"{name}: {path}" for name, path in files.items())]))
    if summary.violations:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
