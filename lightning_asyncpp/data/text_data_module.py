"""LightningDataModule that turns text into batches of token sequences."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from lightning_asyncpp.data.corpus import LIBRARIES, TEXT_PATTERNS, TextFile, check_arguments, find_text_files, split
from lightning_asyncpp.data.replica import check_enough, replica_loader, replica_of, size_of_model
from lightning_asyncpp.data.token_dataset import (
    TokenSource,
    count_sequences,
    default_cache_dir,
    existing_tokens,
    is_token_source,
    is_uri,
    prepared_tokens,
    write_token_dataset,
)
from lightning_asyncpp.data.tokenizer import Tokenizer, load_tokenizer
from lightning_asyncpp.errors import DataError

if TYPE_CHECKING:
    from litdata import StreamingDataLoader

_FORMAT = 3  # version of a prepared folder, increased when older folders must not be used
_log = logging.getLogger(__name__)


class TextDataModule(L.LightningDataModule):
    """LightningDataModule of token sequences from text files, Python's standard library, or a litdata token dataset.

    Large corpora are tokenised before the training by ``asyncpp prepare``, whose folder is the ``source``. Other text
    is tokenised once, by :meth:`prepare_data`, into a folder of ``cache_dir`` whose name has a hash of the text. Every
    process reads the text to compute the hash (1.1 s per GB). A batch is (batch, context_length + 1) int64; sequences
    do not overlap. The order depends on ``seed``, the epoch, the replica, ``batch_size`` and ``num_workers``, and never
    on the number of pipeline stages.

    Args:
        source: a folder of text files; ``"stdlib"`` for the running Python's standard library, ``"packages"`` for the
            installed packages; a folder written by ``asyncpp prepare``; or a litdata dataset written with
            ``TokensLoader``, as a folder or a URI such as ``s3://bucket/tokens``.
        tokenizer: ``"byte"``; ``"bpe"`` to train a byte-pair encoding on the training files; the path of a
            ``tokenizer.json``; or the name of a model repository on the Hugging Face Hub. ``None``: ``"byte"`` for
            text, and for a token dataset the tokenizer that made it.
        vocab_size: number of token ids of the vocabulary to train with ``"bpe"``, or of a litdata dataset.
        context_length: number of tokens that the model sees per sequence; a sample has one more, the last target.
        batch_size: number of sequences per replica and training step.
        val_fraction: share of the text files for validation, chosen by a hash of their names; 0 for no validation.
        val_source: folder or URI of the tokens to validate on, if ``source`` is a token dataset.
        patterns: one or several globs of the text files, relative to the folder.
        max_bytes: maximum number of bytes of text; ``None`` for all.
        cache_dir: folder for prepared datasets; ``None`` for ``lightning_asyncpp`` in the user's cache folder.
        num_workers: number of processes that load data, per training process; 0 loads in the training process.
        shuffle: whether to shuffle the training data in every epoch.
        drop_last: whether to leave out an incomplete last training batch. With several replicas it is always left out,
            also in validation, since all replicas must have the same number of batches.
        seed: seed of the order.
    """

    def __init__(
        self,
        source: str = "stdlib",
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        context_length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.1,
        val_source: str | None = None,
        patterns: Sequence[str] = TEXT_PATTERNS,
        max_bytes: int | None = None,
        cache_dir: str | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int = 42,
    ) -> None:
        super().__init__()
        check_arguments(val_fraction, batch_size)
        if tokenizer == "bpe" and (vocab_size is None or vocab_size < 257):
            raise DataError(f"vocab_size={vocab_size!r}: tokenizer='bpe' needs at least 257: 256 bytes, 1 end token")
        self.source = source
        self.tokenizer_name = tokenizer
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.val_source = val_source
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        self.max_bytes = max_bytes
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.tokens: TokenSource | None = None
        self._definition: str | None = None
        # The arguments are saved in checkpoints to document the training data, but not sent to loggers: Lightning would
        # raise an error if the model had a hyper-parameter of the same name with another value.
        self.save_hyperparameters(logger=False)

    @property
    def sequence_length(self) -> int:
        """Number of tokens per sample: the context and the last target."""
        return self.context_length + 1

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data; a trained one exists after :meth:`setup`."""
        if self.tokens is not None and self.tokens.folder is not None:
            return load_tokenizer(str(self.tokens.folder))
        if self.tokenizer_name == "bpe":
            raise DataError(
                "the tokenizer is trained by prepare_data(); call prepare_data() and setup() first"
                if self.tokens is None
                else f"tokenizer='bpe' is trained on text, but source={self.source!r} holds tokens. Leave `tokenizer`"
                " out, or name the one that made them"
            )
        return load_tokenizer(self.tokenizer_name or "byte")

    def example_batch(self) -> torch.Tensor:
        """Return an example of a training batch: zeros of shape (batch_size, context_length + 1), int64."""
        return torch.zeros(self.batch_size, self.sequence_length, dtype=torch.int64, device="cpu")

    def check_source(self) -> None:
        """Check that the data exists, without reading it.

        Raises:
            DataError: the data is missing, or a token dataset is too short.
        """
        if not is_token_source(self.source):
            self._files()
            return
        self._check_length(existing_tokens(self.source, self.val_source))

    def prepare_data(self) -> None:
        """Tokenise the text, once per node, unless that was done before."""
        if is_token_source(self.source):
            return
        files = self._files()
        folder = self._folder(files)
        if folder.exists():
            return
        _log.info("preparing tokens of %s (%d files) in %s", self.source, len(files), folder)
        train, validation = split(files, self.val_fraction)
        if self.tokenizer_name == "bpe" and self.vocab_size is not None:
            tokenizer = Tokenizer.train((file.read() for file in train), self.vocab_size)
        else:
            tokenizer = load_tokenizer(self.tokenizer_name or "byte")
        write_token_dataset(folder, train, validation, tokenizer)

    def setup(self, stage: str | None = None) -> None:
        """Find the token dataset, and compare it with the arguments and the trainer's model.

        Raises:
            DataError: the dataset is missing or damaged, or does not fit the arguments or the model.
        """
        if is_token_source(self.source):
            self.tokens = existing_tokens(self.source, self.val_source)
        else:
            folder = self._folder(self._files())
            if not folder.is_dir():
                raise DataError(f"{folder} is not prepared. Call prepare_data() before setup(), on every node")
            self.tokens = prepared_tokens(folder)
        self._check_length(self.tokens)
        self._check_vocabulary(self.tokens)
        # Read the tokenizer now, and not only when the first checkpoint is written, so that a missing tokenizer is an
        # error before training. Tokens without metadata do not name their tokenizer.
        is_known = self.tokens.metadata is not None or self.tokenizer_name is not None
        self._definition = self.tokenizer.definition if is_known else None

    def state_dict(self) -> dict[str, Any]:
        """Return the tokenizer for the checkpoint, so that the model can be used without its data."""
        return {} if self._definition is None else {"tokenizer": self._definition}

    def train_dataloader(self) -> StreamingDataLoader:
        """Return the training batches of this process's replica."""
        return self._loader(self._prepared().train, training=True)

    def val_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches of this process's replica; an empty list without validation."""
        validation = self._prepared().validation
        return [] if validation is None else self._loader(validation, training=False)

    def test_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches, since this module has no separate test set."""
        return self.val_dataloader()

    def predict_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches."""
        return self.val_dataloader()

    def _loader(self, split: str, training: bool) -> StreamingDataLoader:
        num_replicas, rank = replica_of(self.trainer)
        drop_last = (training and self.drop_last) or num_replicas > 1
        if drop_last and not is_uri(split):
            _check_sequences(split, self.sequence_length, self.batch_size * num_replicas)
        from litdata import TokensLoader  # see classes_of_litdata

        return replica_loader(
            split,
            self.batch_size,
            replica=(num_replicas, rank),
            num_workers=self.num_workers,
            shuffle=self.shuffle and training,
            drop_last=drop_last,
            seed=self.seed,
            cache_dir=self._download_folder() if is_uri(split) else None,
            item_loader=TokensLoader(block_size=self.sequence_length),
            transform=torch.Tensor.long,
        )

    def _download_folder(self) -> str:
        # One folder per process: litdata deletes chunks after reading them, and counts other readers by its world size,
        # which does not include the other stages of a replica.
        rank = 0 if self.trainer is None else self.trainer.global_rank
        folder = self.cache_dir / "streamed" / f"rank-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    def _prepared(self) -> TokenSource:
        if self.tokens is None:
            raise DataError("the data is not set up; call prepare_data() and setup() first, or give it to a Trainer")
        return self.tokens

    def _files(self) -> list[TextFile]:
        if self.val_source is not None:
            raise DataError(
                f"val_source={self.val_source!r} is for a source of tokens, and source={self.source!r} is text. Give"
                " val_fraction instead, or prepare both with `asyncpp prepare`"
            )
        return find_text_files(self.source, self.patterns, self.max_bytes)

    def _folder(self, files: Sequence[TextFile]) -> Path:
        """Return the tokens' folder, named by the source and a hash of documents, tokenizer and ``val_fraction``."""
        name = self.tokenizer_name or "byte"
        given = f"bpe-{self.vocab_size}" if name == "bpe" else load_tokenizer(name).fingerprint
        name = self.source if self.source in LIBRARIES else Path(self.source).expanduser().resolve().name
        digests = [(file.name, hashlib.sha256(file.path.read_bytes()).hexdigest()) for file in files]
        digest = hashlib.sha256(json.dumps([_FORMAT, digests, given, self.val_fraction]).encode()).hexdigest()
        return self.cache_dir / f"{name.encode(errors='replace').decode()}-{digest[:16]}"

    def _check_length(self, tokens: TokenSource) -> None:
        for folder in (tokens.train, tokens.validation):
            if folder is not None and not is_uri(folder):
                _check_sequences(folder, self.sequence_length, 1)
        known = size_of_model(self.trainer, "context_length")
        if known is not None and self.context_length > known:
            raise DataError(
                f"context_length={self.context_length} of the data is longer than config.context_length={known} of the "
                f"model. Lower the data's, or build the model with context_length={self.context_length}"
            )

    def _check_vocabulary(self, tokens: TokenSource) -> None:
        metadata, name = tokens.metadata, self.tokenizer_name
        if metadata is not None and name not in (None, "bpe"):
            tokenizer = load_tokenizer(name)
            if tokenizer.fingerprint != metadata.tokenizer:
                raise DataError(
                    f"{self.source} was made by another tokenizer ({metadata.tokenizer}, {metadata.vocab_size} token"
                    f" ids) than tokenizer={name!r} ({tokenizer.fingerprint}, {tokenizer.vocab_size} token ids)."
                    " Leave `tokenizer` out, or prepare the text again"
                )
        known = size_of_model(self.trainer, "vocab_size")
        needed = self.vocab_size if metadata is None else metadata.vocab_size
        if known is not None and needed is not None and needed > known:
            raise DataError(
                f"{self.source} has a vocabulary of {needed} token ids, and the model only {known}. Build the model"
                f" with vocab_size={needed}"
            )


def _check_sequences(split: str, length: int, needed: int) -> None:
    samples = f"sequences of context_length + 1 = {length} tokens"
    check_enough(split, count_sequences(Path(split), length), samples, needed, "Lower context_length")
