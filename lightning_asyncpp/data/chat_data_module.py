"""LightningDataModule that turns conversations into batches for fine-tuning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_asyncpp.data.chat_examples import Example, Row, encode, padded, read_rows
from lightning_asyncpp.data.corpus import check_arguments
from lightning_asyncpp.data.replica import check_enough, replica_loader, replica_of, size_of_model
from lightning_asyncpp.data.token_dataset import default_cache_dir, new_folder, write_split
from lightning_asyncpp.data.tokenizer import fetch, is_hub_name, known_tokenizer
from lightning_asyncpp.dependencies import optional_package
from lightning_asyncpp.errors import DataError

if TYPE_CHECKING:
    from litdata import StreamingDataLoader

_FORM = 2
"""Version of the cached format; with another number the cache is rebuilt."""
_SPLITS = ("train", "val")
_FOUND = "found.json"  # number of conversations of each split, and the largest token id


class ChatDataModule(L.LightningDataModule):
    """LightningDataModule of conversations from JSON lines: ``messages``, or ``prompt`` and ``response``.

    The tokenizer's chat template renders a conversation as text. Targets are the assistant's texts, with the ends of
    their turns; all other labels are -100. A batch is padded on the right to its longest conversation: ``input_ids``,
    ``attention_mask`` and ``labels``, (batch, time) int64 each. :meth:`prepare_data` tokenises the rows once, into a
    folder of ``cache_dir`` whose name has a hash of all that determines its content. The order depends on ``seed``, the
    epoch, the replica, ``batch_size`` and ``num_workers``, and never on the number of pipeline stages.

    Args:
        source: a JSONL file.
        tokenizer: folder, or name on the Hugging Face Hub, of the model to train.
        max_length: maximum number of tokens of a conversation; longer ones are left out, and the log says how many.
        batch_size: number of conversations per replica and training step.
        val_source: JSONL file to validate on.
        val_fraction: without ``val_source``, share of ``source`` to validate on, chosen by a hash of the rows.
        cache_dir: folder for tokenised data; ``None`` for ``lightning_asyncpp`` in the user's cache folder.
        num_workers: number of processes that load data, per training process; 0 loads in the training process.
        shuffle: whether to shuffle the training data in every epoch.
        seed: seed of the order.

    Raises:
        DataError: an argument is wrong.
    """

    def __init__(
        self,
        source: str,
        tokenizer: str,
        max_length: int = 1024,
        batch_size: int = 8,
        val_source: str | None = None,
        val_fraction: float = 0.0,
        cache_dir: str | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 42,
    ) -> None:
        super().__init__()
        check_arguments(val_fraction, batch_size)
        self.source, self.tokenizer_name = source, tokenizer
        self.max_length, self.batch_size = max_length, batch_size
        self.val_source, self.val_fraction = val_source, val_fraction
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.num_workers, self.shuffle, self.seed = num_workers, shuffle, seed
        self._prepared: Path | None = None
        self._found: dict[str, int] = {}
        self._padding = 0
        self._definition: str | None = None
        self.save_hyperparameters(logger=False)
        if val_fraction and val_source is not None:
            raise DataError(f"val_fraction={val_fraction} and val_source={val_source!r}: give one of them")
        for name, place in (("source", source), ("val_source", val_source)):
            if place is not None and not Path(place).expanduser().is_file():
                raise DataError(f"{name}={place!r}: there is no such file. Name one with JSON lines")

    def example_batch(self) -> dict[str, Tensor]:
        """Return an example of the longest training batch, without padding: (batch_size, max_length) int64 each."""
        names = ("input_ids", "attention_mask", "labels")
        return {name: torch.ones(self.batch_size, self.max_length, dtype=torch.int64, device="cpu") for name in names}

    def prepare_data(self) -> None:
        """Tokenise the conversations, once per node, unless that was done before.

        Raises:
            DataError: there is no such tokenizer, a row is not a conversation, or the chat template refuses one.
        """
        tokenizer = read_tokenizer(self.tokenizer_name)
        folder = self._folder(tokenizer)
        if not folder.exists():
            self._write(tokenizer, folder)

    def setup(self, stage: str | None = None) -> None:
        """Open the tokenised data, and compare it with the trainer's model.

        Raises:
            DataError: the data is missing, or does not fit the model's sizes.
        """
        tokenizer = read_tokenizer(self.tokenizer_name)
        folder = self._folder(tokenizer)
        if not folder.is_dir():
            raise DataError(f"{folder} is not there; call prepare_data() before setup(), on every node")
        self._prepared, self._found = folder, json.loads((folder / _FOUND).read_text())
        first = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._padding = int(next(token for token in first if token is not None))
        known = known_tokenizer(self.tokenizer_name)
        self._definition = None if known is None else known.definition
        self._check_sizes()

    def state_dict(self) -> dict[str, Any]:
        """Return the tokenizer's definition, for checkpoints; a module may compare it with its model's tokenizer."""
        return {} if self._definition is None else {"tokenizer": self._definition}

    def train_dataloader(self) -> StreamingDataLoader:
        """Return the training batches of this process's replica."""
        return self._loader("train", training=True)

    def val_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches of this process's replica; an empty list without validation."""
        return self._loader("val", training=False) if self._found.get("val") else []

    def test_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches."""
        return self.val_dataloader()

    def _loader(self, split: str, training: bool) -> StreamingDataLoader:
        if self._prepared is None:
            raise DataError("the data is not set up; call prepare_data() and setup() first, or give it to a Trainer")
        replicas, rank = replica_of(self.trainer)
        if drop_last := training or replicas > 1:
            where = self.val_source if split == "val" and self.val_source else self.source
            samples = f"conversations ({split}) of at most max_length={self.max_length} tokens"
            check_enough(where, self._found[split], samples, self.batch_size * replicas, "Raise max_length")
        return replica_loader(
            str(self._prepared / split), self.batch_size, replica=(replicas, rank), num_workers=self.num_workers,
            shuffle=training and self.shuffle, drop_last=drop_last, seed=self.seed,
            collate_fn=partial(padded, self._padding),
        )  # fmt: skip

    def _write(self, tokenizer: Any, folder: Path) -> None:
        encoded: dict[str, list[Example]] = {split: [] for split in _SPLITS}
        seen = 0
        for split, row in self._rows():
            example = encode(tokenizer, row)
            seen += 1
            if len(example.tokens) <= self.max_length and any(example.is_target):
                encoded[split].append(example)
        if left_out := seen - sum(map(len, encoded.values())):
            rank_zero_info(
                f"{left_out:,} of {seen:,} conversations are longer than max_length={self.max_length} tokens, or have"
                " no assistant text to learn from, and are left out"
            )
        largest = max((max(example.tokens) for examples in encoded.values() for example in examples), default=0)
        with new_folder(folder) as temporary:
            for split, examples in encoded.items():
                if examples:
                    write_split(temporary / split, (example.sample() for example in examples))
            found = {split: len(examples) for split, examples in encoded.items()}
            (temporary / _FOUND).write_text(json.dumps({**found, "largest": largest}))

    def _rows(self) -> Iterator[tuple[str, Row]]:
        for row in read_rows(Path(self.source).expanduser(), self.val_fraction):
            yield "val" if row.in_validation else "train", row
        if self.val_source is not None:
            yield from (("val", row) for row in read_rows(Path(self.val_source).expanduser()))

    def _folder(self, tokenizer: Any) -> Path:
        """Return the cache's folder, named by a hash of the rows and of all that determines their tokens."""
        decides = [_FORM, self.max_length, self.val_fraction, tokenizer.chat_template, tokenizer.eos_token]
        digest = hashlib.sha256(json.dumps(decides, default=str).encode())
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
        for place in (self.source, self.val_source):
            if place is not None:
                digest.update(Path(place).expanduser().read_bytes() + b"\0")
        return self.cache_dir / f"chat-{digest.hexdigest()[:24]}"

    def _check_sizes(self) -> None:
        largest = self._found["largest"]
        for name, needs in (("vocab_size", max(largest, self._padding) + 1), ("context_length", self.max_length)):
            has = size_of_model(self.trainer, name)
            if has is not None and needs > has:
                raise DataError(
                    f"the model has token ids 0 to {has - 1}, but tokenizer={self.tokenizer_name!r} produces id"
                    f" {needs - 1}; name the tokenizer that belongs to the model"
                    if name == "vocab_size"
                    else f"max_length={needs} is longer than the model's context of {has} tokens; lower it"
                )


def read_tokenizer(name: str) -> Any:
    """Return the fast tokenizer of `transformers` in a folder or in a repository of the hub.

    Raises:
        DataError: it does not exist or is not fast, or the hub cannot be reached.
        ImportError: `transformers` is not installed.
    """
    auto = optional_package("transformers", "ChatDataModule").AutoTokenizer
    if is_hub_name(name):
        fetch(name, "tokenizer.json")  # reports an error of the network in one line
    try:
        tokenizer = auto.from_pretrained(str(Path(name).expanduser()))
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer={name!r}: {next(iter(str(error).splitlines()), error)}") from error
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer={name!r} has no tokenizer.json, which says which characters a token stands for")
    return tokenizer
