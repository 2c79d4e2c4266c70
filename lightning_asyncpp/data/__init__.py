"""Text, tokens, and the batches made of them."""

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.replica import use_replica
from lightning_asyncpp.data.text_data_module import TextDataModule
from lightning_asyncpp.data.tokenizer import BPETokenizer, ByteTokenizer
from lightning_asyncpp.data.unigram import unigram_loss

__all__ = ["BPETokenizer", "ByteTokenizer", "DataError", "TextDataModule", "unigram_loss", "use_replica"]
