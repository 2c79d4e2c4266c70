"""``asyncpp export``: a trained model as a folder that `transformers`, and what reads its files, loads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lightning_asyncpp.data import hf_tokenizer_files
from lightning_asyncpp.models.hf import write_hf
from lightning_asyncpp.tools.saved.model_arguments import (
    DTYPES,
    check_choice,
    find_tokenizer,
    read_model,
    reported,
)
from lightning_asyncpp.tools.saved.parsers import export_parser
from lightning_asyncpp.tools.text import escaped, say

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder, and say what it holds."""
    parser = export_parser()
    arguments = parser.parse_args(argv)
    check_choice(parser, arguments, "dtype")
    if arguments.to != "hf":
        parser.error(f"--to {arguments.to}: there is 'hf' only, the format of Hugging Face transformers")
    shard = _size(arguments.max_shard_size)
    if shard is None:
        parser.error(f"--max-shard-size {arguments.max_shard_size}: give bytes, or a number with a unit such as 500MB")
    folder = Path(arguments.output).expanduser()
    with reported("export"):
        saved = read_model(arguments)
        tokenizer = find_tokenizer(saved, arguments.tokenizer)
        files = {} if tokenizer is None else hf_tokenizer_files(tokenizer, saved.config.context_length)
        end = None if tokenizer is None else tokenizer.end_of_document
        dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
        architecture = write_hf(saved, folder, dtype, shard, end, files)
    say(f"{architecture.class_name} of {saved.config.num_parameters():,} parameters: {escaped(str(folder))}")
    if tokenizer is None:
        print("Without a tokenizer: the checkpoint holds none; --tokenizer names one.")


def _size(text: str) -> int | None:
    """Bytes of ``5GB``, ``500 MB`` or ``123``; ``None`` if it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    return size or None


if __name__ == "__main__":
    main()
