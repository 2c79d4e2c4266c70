"""``asyncpp export``: a trained model as a folder that `transformers`, and what reads its files, loads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import Namespace

from lightning_asyncpp.data import hf_tokenizer_files
from lightning_asyncpp.models import WeightsError
from lightning_asyncpp.models.hf import write_hf
from lightning_asyncpp.tools.saved.model_arguments import (
    DTYPES,
    check_choice,
    find_tokenizer,
    read_model,
    reported,
)
from lightning_asyncpp.tools.saved.parsers import LORA_FORMS, export_parser

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder, and say what it holds."""
    parser = export_parser()
    arguments = parser.parse_args(argv)
    check_choice(parser, arguments, "dtype")
    shard = _size(arguments.max_shard_size)
    if shard is None:
        parser.error(f"--max-shard-size {arguments.max_shard_size}: give bytes, or a number with a unit such as 500MB")
    if arguments.lora not in LORA_FORMS:
        parser.error(f"--lora {arguments.lora}: choose one of {', '.join(LORA_FORMS)}")
    folder = Path(arguments.output).expanduser()
    if _export_of_transformers(arguments, folder, shard):
        return
    with reported("export"):
        saved = read_model(arguments)
        tokenizer = find_tokenizer(saved, arguments.tokenizer)
        files = {} if tokenizer is None else hf_tokenizer_files(tokenizer, saved.config.context_length)
        end = None if tokenizer is None else tokenizer.end_of_document
        dtype = _dtype(arguments)
        architecture = write_hf(saved, folder, dtype, shard, end, files)
    print(f"{architecture.class_name} of {saved.config.num_parameters():,} parameters: {folder}")
    if tokenizer is None:
        print("Without a tokenizer: the checkpoint holds none; --tokenizer names one.")


def _export_of_transformers(arguments: Namespace, folder: Path, shard: int) -> bool:
    """Write the folder of a checkpoint of ``HFModule``; whether it is one."""
    from lightning_asyncpp.tools.saved.hf_export import export_hf, read_trained  # what most exports do without

    with reported("export"):
        trained = read_trained(Path(arguments.model).expanduser())
        if trained is None:
            return False
        if arguments.config is not None:
            raise WeightsError(f"{arguments.model} says what its model is; leave --config out")
        name, has_tokenizer = export_hf(trained, folder, _dtype(arguments), shard, arguments.tokenizer, arguments.lora)
    print(f"{name} of {sum(t.numel() for t in trained.weights.values()):,} parameters: {folder}")
    if not has_tokenizer:
        print(f"Without a tokenizer: that of {trained.model_id} is not on this machine; --tokenizer names one.")
    return True


def _dtype(arguments: Namespace) -> torch.dtype | None:
    return None if arguments.dtype is None else DTYPES[arguments.dtype]


def _size(text: str) -> int | None:
    """Bytes of ``5GB``, ``500 MB`` or ``123``; ``None`` if it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    return size or None


if __name__ == "__main__":
    main()
