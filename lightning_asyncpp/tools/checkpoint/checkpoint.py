"""``asyncpp checkpoint info|convert``: looks into checkpoints, and writes them in another form."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.tools.checkpoint.contents import describe, size_on_disk, table
from lightning_asyncpp.tools.checkpoint.convert import Request, convert
from lightning_asyncpp.tools.parsers import FORMS, checkpoint_command, convert_parser, info_parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``asyncpp checkpoint <command> ...``."""
    if (given := checkpoint_command(argv)) is None:
        return
    command, rest = given
    {"info": _info, "convert": _convert}[command](rest)


def _info(argv: Sequence[str]) -> None:
    parser = info_parser()
    arguments = parser.parse_args(argv)
    with _reported("info"):
        facts = describe(Path(arguments.checkpoint).expanduser())
    print(json.dumps(facts, indent=2) if arguments.json else table(facts))


def _convert(argv: Sequence[str]) -> None:
    parser = convert_parser()
    arguments = parser.parse_args(argv)
    if arguments.to not in FORMS:
        parser.error(f"--to {arguments.to}: choose one of {', '.join(FORMS)}")
    if arguments.stages is not None and arguments.to != "sharded":
        parser.error(f"--stages {arguments.stages}: only a sharded checkpoint has parts; give --to sharded")
    if arguments.entry is not None and arguments.to != "weights":
        parser.error(f"--entry {arguments.entry}: only weights are taken from one entry; give --to weights")
    source, output = Path(arguments.checkpoint).expanduser(), Path(arguments.output).expanduser()
    request = Request(source, output, arguments.to, arguments.stages, arguments.entry, arguments.force)
    with _reported("convert"):
        convert(request)
    print(f"{output}: {arguments.to}, {size_on_disk(output):,} bytes")


@contextmanager
def _reported(command: str) -> Iterator[None]:
    """End the command with what is wrong, without a traceback, and code 2."""
    try:
        yield
    except StorageError as error:
        print(f"asyncpp checkpoint {command}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
