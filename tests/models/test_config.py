from __future__ import annotations

import pytest

from lightning_asyncpp.models import GPT, GPTConfig


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
def test_number_of_parameters(tie_embeddings: bool, num_kv_heads: int | None) -> None:
    config = GPTConfig(
        vocab_size=50, num_layers=3, dim=48, num_heads=4, num_kv_heads=num_kv_heads, tie_embeddings=tie_embeddings
    )
    assert config.num_parameters() == sum(parameter.numel() for parameter in GPT(config).parameters())


def test_default_mlp_width_is_a_multiple_of_64_at_least_8_thirds() -> None:
    for dim in (6, 24, 48, 384, 768, 1000 * 6):
        width = GPTConfig(dim=dim, num_heads=3).mlp_width
        assert width % 64 == 0
        assert 0 <= width - 8 * dim / 3 < 64


def test_all_problems_at_once() -> None:
    with pytest.raises(ValueError, match="GPTConfig") as caught:
        GPTConfig(vocab_size=0, num_layers=-1, mlp_dim=0, rope_base=1.0, norm_eps=0.0, dropout=1.0, init_std=0.0)
    message = str(caught.value)
    for name in ("vocab_size=0", "num_layers=-1", "mlp_dim=0", "rope_base", "norm_eps", "dropout", "init_std"):
        assert name in message
    assert message.count("\n") == 7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dim": 50, "num_heads": 4}, "num_heads=4: must divide dim=50"),
        ({"dim": 12, "num_heads": 4}, "= 3 features"),
        ({"dim": 48, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3: must divide num_heads=4"),
        ({"context_length": 2.5}, "context_length=2.5"),
    ],
)
def test_sizes_that_do_not_fit(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match="cannot be built") as caught:
        GPTConfig(**arguments)
    assert named in str(caught.value)
