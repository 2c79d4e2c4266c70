"""The LightningDataModule that turns text into batches of token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from lightning_asyncpp.data.cache_dir import cache_dir_of, folder_for_stream, known, wrong_cache_dir
from lightning_asyncpp.data.corpus import TEXT_PATTERNS, find_text_files
from lightning_asyncpp.data.errors import DataError, file_errors
from lightning_asyncpp.data.model_sizes import size_of_model
from lightning_asyncpp.data.source import (
    TextSource,
    TokenSource,
    existing_tokens,
    is_token_source,
    is_uri,
    load_tokenizer,
)
from lightning_asyncpp.data.token_dataset import CheckedTokens, count_sequences, verify_checksums
from lightning_asyncpp.data.token_loader import token_loader
from lightning_asyncpp.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from litdata import StreamingDataLoader


class TextDataModule(L.LightningDataModule):
    """Batches of token sequences from a folder of text, Python's standard library, or a litdata token dataset.

    Corpora of some size are tokenised before, by ``asyncpp prepare``; its folder is the ``source``. Other text is
    tokenised once, by :meth:`prepare_data`, into a folder of ``cache_dir`` that is named after its content, which every
    process reads for that (1.1 s per GB). A batch is (batch, context_length + 1) int64; sequences do not overlap. The
    order depends on ``seed``, the epoch, the replica, ``batch_size`` and ``num_workers``, and never on the number of
    pipeline stages.

    Args:
        source: a folder of text files; ``"stdlib"`` for the running Python's standard library, ``"packages"`` for what
            is installed beside it; a folder that ``asyncpp prepare`` wrote; or a litdata dataset that was written with
            ``TokensLoader``, as a folder or a URI such as ``s3://bucket/tokens``.
        tokenizer: ``"byte"``, ``"bpe"`` to train one on the training files, the path of a ``tokenizer.json``, or the
            name of a repository of models on the Hugging Face Hub. ``None`` stands for ``"byte"`` with text; with
            tokens it stands for whatever they were made with.
        vocab_size: number of token ids: of the vocabulary to train with ``"bpe"``, and otherwise the one that the data
            must have.
        context_length: tokens that the model sees per sequence; a sample has one more, the last target.
        batch_size: sequences per replica and training step.
        val_fraction: share of the text files that are kept for validation, chosen by a hash of their names; 0 for no
            validation.
        val_source: folder or URI of the tokens to validate on, if ``source`` is a litdata dataset.
        patterns: globs of the text files to take, relative to the folder.
        max_bytes: most bytes of text to take; ``None`` for all.
        cache_dir: folder for prepared datasets; ``None`` for ``lightning_asyncpp`` in the user's cache folder.
        num_workers: processes that load data, per training process; 0 loads in the training process.
        shuffle: whether to train in another order in every epoch.
        drop_last: whether to leave out an incomplete last training batch. Validation leaves it out only if there are
            several replicas, which must all have the same number of batches.
        seed: seed of the order.
        verify_checksums: whether every process reads what was prepared whole and compares it with its checksums when a
            run starts, which takes as long as reading takes. Without, the sizes of all files are compared.
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
        verify_checksums: bool = True,
    ) -> None:
        super().__init__()
        self.source = source
        self.tokenizer_name = tokenizer
        self.expected_vocab_size = vocab_size
        self.context_length = context_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.val_source = val_source
        self.patterns = tuple(patterns)
        self.max_bytes = max_bytes
        self.cache_dir = cache_dir_of(cache_dir)
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.verify_checksums = verify_checksums
        self.tokens: TokenSource | None = None
        self._definition: str | None = None
        # For a checkpoint, which says so what its model was trained with. Not for loggers: they would refuse names that
        # the model's hyper-parameters have, too.
        self.save_hyperparameters(logger=False)
        with self._reading():
            problems = self._wrong_arguments()
        if problems:
            raise DataError("TextDataModule cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))

    @property
    def sequence_length(self) -> int:
        """Tokens per sample: the context and the last target."""
        return self.context_length + 1

    @property
    def vocab_size(self) -> int:
        """Number of token ids; known before :meth:`setup` unless it is a property of the data."""
        if self.tokens is not None and self.tokens.metadata is not None:
            return self.tokens.metadata.vocab_size
        if self.expected_vocab_size is not None:
            return self.expected_vocab_size
        if self.tokenizer_name is None and is_token_source(self.source):
            raise DataError(f"{self.source} does not say its vocabulary; give vocab_size")
        return self.tokenizer.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data; a trained one exists after :meth:`setup`."""
        folder = None if self.tokens is None else self.tokens.folder
        if folder is not None and (folder / "tokenizer.json").exists():
            return load_tokenizer(str(folder / "tokenizer.json"))
        if self.tokenizer_name == "bpe":
            raise DataError("the tokenizer is trained by prepare_data(); call it, and setup(), before")
        return load_tokenizer(self.tokenizer_name or "byte")

    def example_batch(self) -> torch.Tensor:
        """What a training batch looks like: token 0 everywhere, (batch_size, context_length + 1) int64."""
        return torch.zeros(self.batch_size, self.sequence_length, dtype=torch.int64, device="cpu")

    def check_source(self) -> None:
        """Find out whether the data are there and can be read, without reading them.

        Raises:
            DataError: they are not, or cannot.
        """
        with self._reading():
            if not is_token_source(self.source):
                find_text_files(self.source, self.patterns)
                return
            tokens = existing_tokens(self.source, self.val_source)
            for split in (tokens.train, tokens.validation):
                if split is not None and not is_uri(split):
                    self._check_sequences(split, batches=False)

    def prepare_data(self) -> None:
        """Tokenise the text unless that was done before; once per node."""
        with self._reading():
            if not is_token_source(self.source):
                self._text().prepare()

    def setup(self, stage: str | None = None) -> None:
        """Find the token dataset and check it.

        Raises:
            DataError: the dataset is missing or damaged, cannot be read, or does not fit the arguments or the trainer's
                model.
        """
        with self._reading():
            self._find_tokens()
            # Now, and not when the first checkpoint is written: a tokenizer that is not there is known before.
            self._definition = self.tokenizer.definition if self._has_known_tokenizer() else None

    def _find_tokens(self) -> None:
        if is_token_source(self.source):
            self.tokens = existing_tokens(self.source, self.val_source)
        else:
            self.tokens = self._text().prepared()
        self._check_vocabulary()
        self._check_context()
        for split in (self.tokens.train, self.tokens.validation):
            if split is not None and not is_uri(split):
                self._check_sequences(split, batches=False)
        if self.verify_checksums and self.tokens.folder is not None and self.tokens.metadata is not None:
            verify_checksums(self.tokens.folder, self.tokens.metadata)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the tokenizer, so that the model can be used where its data is not."""
        return {} if self._definition is None else {"tokenizer": self._definition}

    def train_dataloader(self) -> StreamingDataLoader:
        """Return the training batches of this process's replica."""
        return self._loader(self._prepared().train, training=True)

    def val_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches of this process's replica; an empty list without validation."""
        validation = self._prepared().validation
        return [] if validation is None else self._loader(validation, training=False)

    def test_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches: a language model's test set is a choice of the user."""
        return self.val_dataloader()

    def predict_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Return the validation batches."""
        return self.val_dataloader()

    def _loader(self, split: str, training: bool) -> StreamingDataLoader:
        num_replicas, rank = self._replica()
        drop_last = self.drop_last if training else num_replicas > 1
        if training and num_replicas > 1 and not drop_last:
            raise DataError(
                f"drop_last=False with {num_replicas} replicas gives them different numbers of batches; leave it True"
            )
        process = 0 if self.trainer is None else self.trainer.global_rank
        download_folder = folder_for_stream(known(self.cache_dir), process) if is_uri(split) else None
        with self._reading():
            if not is_uri(split):
                self._check_sequences(split, batches=drop_last)
            return token_loader(
                split,
                sequence_length=self.sequence_length,
                batch_size=self.batch_size,
                num_workers=self.num_workers,
                shuffle=self.shuffle and training,
                drop_last=drop_last,
                seed=self.seed,
                replica=(num_replicas, rank),
                download_folder=download_folder,
                transform=self._checked_tokens(split),
            )

    def _checked_tokens(self, split: str) -> CheckedTokens:
        tokens = self._prepared()
        prepared = tokens.folder if tokens.folder is not None and Path(split).parent == tokens.folder else None
        known = self._known_vocab_size()
        return CheckedTokens(split, size_of_model(self.trainer, "vocab_size") if known is None else known, prepared)

    def _has_known_tokenizer(self) -> bool:
        # Tokens that others wrote do not say what made them.
        return self.tokens is not None and (self.tokens.metadata is not None or self.tokenizer_name is not None)

    def _known_vocab_size(self) -> int | None:
        metadata = self._prepared().metadata
        return self.expected_vocab_size if metadata is None else metadata.vocab_size

    def _replica(self) -> tuple[int, int]:
        sampler = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if sampler is None else (sampler["num_replicas"], sampler["rank"])

    def _reading(self) -> AbstractContextManager[None]:
        mend = "let this user read it (chmod), or name another source"
        return file_errors(f"source={self.source!r}", "read", mend)

    def _prepared(self) -> TokenSource:
        if self.tokens is None:
            raise DataError("the data is not set up; call prepare_data() and setup() first, or give it to a Trainer")
        return self.tokens

    def _text(self) -> TextSource:
        return TextSource(
            self.source,
            self.patterns,
            self.tokenizer_name or "byte",
            self.expected_vocab_size,
            self.val_fraction,
            self.max_bytes,
            known(self.cache_dir),
        )

    def _check_sequences(self, split: str, batches: bool) -> None:
        sequences = count_sequences(Path(split), self.sequence_length)
        needed = self.batch_size * self._replica()[0] if batches else 1
        if sequences < needed:
            raise DataError(
                f"{split} holds {sequences} sequences of context_length + 1 = {self.sequence_length} tokens, and at "
                f"least {needed} are needed; lower context_length or batch_size, or give more text"
            )

    def _check_vocabulary(self) -> None:
        metadata = self._prepared().metadata
        if metadata is not None:
            expected = self.expected_vocab_size
            if self.tokenizer_name not in (None, "bpe"):
                self._check_tokenizer(metadata.tokenizer, metadata.vocab_size)
            elif expected is not None and self.tokenizer_name is None and expected != metadata.vocab_size:
                raise DataError(
                    f"{self.source} has a vocabulary of {metadata.vocab_size} token ids instead of vocab_size="
                    f"{expected}; correct vocab_size, or name another dataset"
                )
        known, needed = size_of_model(self.trainer, "vocab_size"), self._known_vocab_size()
        if known is not None and needed is not None and needed > known:
            raise DataError(
                f"{self.source} has a vocabulary of {needed} token ids, and the model only {known}; "
                f"build the model with vocab_size={needed}"
            )

    def _check_context(self) -> None:
        known = size_of_model(self.trainer, "context_length")
        if known is not None and self.context_length > known:
            raise DataError(
                f"context_length={self.context_length} of the data is longer than config.context_length={known} of the "
                f"model; lower the data's, or build the model with context_length={self.context_length}"
            )

    def _check_tokenizer(self, fingerprint: str, vocab_size: int) -> None:
        tokenizer = self.tokenizer if self._prepared().folder is None else load_tokenizer(str(self.tokenizer_name))
        if tokenizer.fingerprint != fingerprint:
            raise DataError(
                f"{self.source} was made by another tokenizer ({fingerprint}, {vocab_size} token ids) than "
                f"tokenizer={self.tokenizer_name!r} ({tokenizer.fingerprint}, {tokenizer.vocab_size} token ids); "
                "leave `tokenizer` out, or prepare the text again"
            )

    def _wrong_arguments(self) -> list[str]:
        problems = [
            f"{name}={value!r}: must be a whole number of at least {least}"
            for name, value, least in (
                ("context_length", self.context_length, 1),
                ("batch_size", self.batch_size, 1),
                ("num_workers", self.num_workers, 0),
                ("seed", self.seed, 0),
                ("max_bytes", 1 if self.max_bytes is None else self.max_bytes, 1),
                ("vocab_size", 1 if self.expected_vocab_size is None else self.expected_vocab_size, 1),
            )
            if not isinstance(value, int) or isinstance(value, bool) or value < least
        ]
        if not 0 <= self.val_fraction < 1:
            problems.append(f"val_fraction={self.val_fraction!r}: must be at least 0 and below 1")
        if not self.patterns:
            problems.append("patterns=[]: give at least one glob, for instance '**/*.txt'")
        return problems + self._wrong_cache_dir() + self._wrong_combinations()

    def _wrong_cache_dir(self) -> list[str]:
        if is_token_source(self.source) and not is_uri(self.source):
            return []  # nothing is kept
        return wrong_cache_dir(self.cache_dir)

    def _wrong_combinations(self) -> list[str]:
        problems = []
        tokens, vocab_size = is_token_source(self.source), self.expected_vocab_size
        if self.tokenizer_name == "bpe" and tokens:
            problems.append(
                "tokenizer='bpe': a vocabulary is trained on text, and source is a token dataset; leave it out"
            )
        elif self.tokenizer_name == "bpe" and (vocab_size is None or vocab_size < 257):
            problems.append(f"vocab_size={vocab_size!r}: tokenizer='bpe' needs at least 257, the bytes and an end")
        if not tokens and self.tokenizer_name in (None, "byte") and vocab_size not in (None, 256):
            problems.append(
                f"vocab_size={vocab_size!r}: the byte tokenizer has 256; leave it out, or set tokenizer='bpe'"
            )
        if not tokens and self.val_source is not None:
            problems.append(f"val_source={self.val_source!r}: is for token datasets; text is divided by val_fraction")
        return problems
