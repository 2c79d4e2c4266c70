"""Text, tokens, and batches made of them."""

from lightning_asyncpp.data.chat_data_module import ChatDataModule
from lightning_asyncpp.data.replica import use_replica
from lightning_asyncpp.data.text_data_module import TextDataModule
from lightning_asyncpp.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of_definition
from lightning_asyncpp.errors import DataError

__all__ = [
    "ByteTokenizer",
    "ChatDataModule",
    "DataError",
    "TextDataModule",
    "Tokenizer",
    "tokenizer_of_definition",
    "use_replica",
]
