"""Token ids that no row of an embedding stands for are refused where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_asyncpp.data.errors import DataError


@dataclass(frozen=True)
class CheckedTokens:
    """Makes int64 of the stored tokens of a split, and checks that the vocabulary has them.

    An embedding would end in an IndexError that names nothing, on a GPU in an assertion of the device. A class and no
    closure: litdata's worker processes are sent a pickled copy.
    """

    split: str
    """Folder or URI of the split, for the message."""
    vocab_size: int | None
    """Number of token ids; ``None`` if nobody knows it, and then nothing is checked."""
    prepared: Path | None = None
    """Folder to delete when the split is damaged; ``None`` for a dataset that others wrote."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` (length,) as int64. Negative ids pass: they stand for padding.

        Raises:
            DataError: a token id is not below ``vocab_size``.
        """
        converted = tokens.long()
        if self.vocab_size is not None:
            largest = int(converted.max())
            if largest >= self.vocab_size:
                raise DataError(self._message(largest, self.vocab_size))
        return converted

    def _message(self, largest: int, vocab_size: int) -> str:
        mend = (
            f"name the right dataset, or set vocab_size, the data's and the model's, to at least {largest + 1}"
            if self.prepared is None
            else f"it is damaged: delete {self.prepared} and have it prepared again, or restore it from where it came"
        )
        return (
            f"{self.split} holds a sequence with token id {largest}, and the vocabulary has {vocab_size} ids "
            f"(0 ... {vocab_size - 1}); {mend}"
        )
