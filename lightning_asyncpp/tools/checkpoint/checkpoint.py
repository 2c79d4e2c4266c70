"""``asyncpp checkpoint info|convert``: looks into checkpoints, and writes them as one file or their weights alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file as save_safetensors
from torch import Tensor

from lightning_asyncpp.storage.durable import usual_mode
from lightning_asyncpp.storage.files import StorageError, save_file, written_beside
from lightning_asyncpp.storage.folders import load
from lightning_asyncpp.tools.checkpoint.contents import describe, model_in, size_on_disk, table
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
    if arguments.entry is not None and arguments.to != "weights":
        parser.error(f"--entry {arguments.entry}: only weights are taken from one entry; give --to weights")
    source, output = Path(arguments.checkpoint).expanduser(), Path(arguments.output).expanduser()
    with _reported("convert"):
        if os.path.lexists(output) and not arguments.force:
            raise StorageError(f"{output} exists already; name another, or give --force to replace it")
        content = load(source)
        if not isinstance(content, Mapping):
            raise StorageError(f"{source} is no checkpoint: it holds a {type(content).__name__}")
        if arguments.to == "full":
            save_file(content, output)
        else:
            _write_weights(model_in(content, arguments.entry), output)
    print(f"{output}: {arguments.to}, {size_on_disk(output):,} bytes")


def _write_weights(weights: Mapping[str, Tensor], output: Path) -> None:
    if output.suffix != ".safetensors":
        save_file(dict(weights), output)
        return
    with written_beside(output) as partial, usual_mode(partial):
        # The format has no tensors that share memory.
        own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
        save_safetensors(own, partial)


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
