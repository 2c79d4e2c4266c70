"""Opening saved weights, whatever they are: a checkpoint of this package, or a folder of `transformers`."""

from __future__ import annotations

from pathlib import Path

from lightning_asyncpp.models.checkpoint import read_checkpoint
from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.errors import WeightsError
from lightning_asyncpp.models.saved import SavedGPT
from lightning_asyncpp.storage.index import is_sharded


def open_saved(path: str | Path, config: GPTConfig | None = None) -> SavedGPT:
    """Open a checkpoint, in one file or sharded, or a folder with config.json and safetensors.

    Args:
        path: the file or folder.
        config: the shape of a model whose checkpoint does not say it.

    Raises:
        WeightsError: it is neither, or holds no GPT.
    """
    path = Path(path).expanduser()
    if path.is_file() or is_sharded(path):
        return read_checkpoint(path, config)
    if (path / "config.json").is_file():
        if config is not None:
            raise WeightsError(f"{path} has a config.json; leave the other config out")
        from lightning_asyncpp.models.hf import read_hf  # needs a package that checkpoints do not

        return read_hf(path)
    if path.is_dir():
        raise WeightsError(
            f"{path} is a folder without index.json and config.json; name a checkpoint, or a folder of transformers"
        )
    raise WeightsError(f"{path}: there is no such file or folder; models of a hub have to be downloaded first")
