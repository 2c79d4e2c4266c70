"""Generated text is shown as soon as its characters are complete, and continues the prompt with its spaces."""

from __future__ import annotations

from lightning_asyncpp.data import ByteTokenizer, Tokenizer
from lightning_asyncpp.data.tokenizer import prompt_tokens
from lightning_asyncpp.tools.generate import stream


def test_text_comes_when_its_characters_are_complete() -> None:
    text = "größe 日本 🙂!"
    tokens = list(text.encode())
    pieces = list(stream(ByteTokenizer(), iter(tokens)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[:3] == ["g", "r", "ö"]
    # A character that stays incomplete is shown at the end.
    assert "".join(stream(ByteTokenizer(), iter(tokens[:3]))) == "gr\ufffd"
    trained = Tokenizer.train([text * 20], 300)
    assert "".join(stream(trained, iter(trained.encode_batch([text])[0].tolist()))) == text


def test_the_space_behind_a_prompt() -> None:
    """Tokenizers such as Llama 2's drop the first space of a text, but the space after a prompt must be kept."""
    import tokenizers

    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"▁one": 0, "▁two": 1, "</s>": 2, "?": 3}, unk_token="?")
    )
    backend.add_special_tokens(["</s>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    prompt = prompt_tokens(tokenizer, "one")
    assert prompt == [0]
    assert "".join(stream(tokenizer, iter([1, 0, 2]), prompt)) == " two one"
    assert "".join(stream(tokenizer, iter([1, 0, 2]), [2])) == "two one"
