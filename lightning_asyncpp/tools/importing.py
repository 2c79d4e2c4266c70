"""``asyncpp import``: a model folder of `transformers` as a checkpoint of this package, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import lightning
import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_asyncpp.models import SavedGPT, WeightsError
from lightning_asyncpp.models.hf import read_hf
from lightning_asyncpp.storage import save_file
from lightning_asyncpp.tools.parsers import import_parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the config for a recipe, and write the checkpoint if it is asked for."""
    arguments = import_parser().parse_args(argv)
    saved = read_hf(Path(arguments.folder).expanduser())
    saved.check()
    if arguments.output is not None:
        write_checkpoint(saved, Path(arguments.output).expanduser())
    print("# What the model of a recipe needs; `initial_weights` takes the folder or the checkpoint.")
    config = asdict(saved.config)
    shown = {"config": config, "initial_weights": arguments.output or arguments.folder}
    print(yaml.safe_dump({"model": {"class_path": "lightning_asyncpp.GPTModule", "init_args": shown}}, sort_keys=False))


def write_checkpoint(saved: SavedGPT, path: Path) -> None:
    """Write weights that ``GPTModule`` loads: a checkpoint of the Trainer without a state of training.

    Raises:
        WeightsError: there is such a file already.
        StorageError: it cannot be written.
    """
    if path.exists():
        raise WeightsError(f"{path} exists already; name another file, or remove it")
    content = {
        "state_dict": {f"model.{name}": saved.tensors[name].float() for name in saved.shapes},
        # With the class, or LightningCLI takes the config for arguments of LightningModule.
        "hyper_parameters": {"_class_path": "lightning_asyncpp.GPTModule", "config": asdict(saved.config)},
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
    }
    if saved.tokenizer is not None:
        content["TextDataModule"] = {"tokenizer": saved.tokenizer}
    save_file(content, path)
