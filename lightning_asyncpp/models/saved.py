"""A GPT that was saved: its config, its weights under the names of its ``state_dict``, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.gpt import GPT

# Of no meaning to a model that was trained.
TRAINING_ONLY = frozenset({"dropout", "moe.balance_loss", "moe.z_loss", "moe.balance_bias_rate"})
# Two models that differ in these can have the same weights.
_FREE = TRAINING_ONLY | {"context_length", "init_std"}


class WeightsError(ValueError):
    """Saved weights, or what was asked of them, are wrong; the message names the file and what to do."""

    @classmethod
    def from_problems(cls, what: str, problems: Sequence[str]) -> WeightsError:
        """One error with all problems of ``what``, a line each."""
        return cls(f"{what}:\n" + "\n".join(f"  - {problem}" for problem in problems))


@dataclass(frozen=True)
class SavedGPT:
    """A saved model; its tensors stay in their files until they are read."""

    origin: str
    """Where it lies, for messages."""
    config: GPTConfig
    """The model's shape."""
    tensors: Mapping[str, Tensor]
    """Name in the model's ``state_dict`` -> tensor, read when it is asked for."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape, known without reading the tensor."""
    tokenizer: str | None = None
    """Definition of the tokenizer: ``"byte"``, or the content of a tokenizer.json; ``None`` if nobody wrote it down."""

    def check(self) -> None:
        """Compare names and shapes with those of a GPT of this config.

        Raises:
            WeightsError: they differ; all differences are named.
        """
        problems = tensor_problems(self.shapes, expected_shapes(self.config))
        if problems:
            raise WeightsError.from_problems(f"{self.origin} does not hold the weights of its config", problems)

    def build(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> GPT:
        """Make the model, ready to evaluate; weights that need no conversion are mapped from their file.

        Args:
            device: where to put it.
            dtype: of its weights.

        Raises:
            WeightsError: as :meth:`check` says.
        """
        self.check()
        with torch.device("meta"):
            model = GPT(self.config)
        model.load_state_dict({name: self.tensors[name].float() for name in self.shapes}, assign=True)
        model.head.tie_weights()
        for module in model.modules():
            _fill_buffers(module)
        # Not tensor by tensor: modules know what stays in fp32.
        return model.to(device, dtype).eval().requires_grad_(False)


def expected_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all that the ``state_dict`` of a GPT holds.

    Raises:
        WeightsError: torch has no tensors of such sizes.
    """
    try:
        with torch.device("meta"):
            model = GPT(config)
    except (TypeError, OverflowError, RuntimeError) as error:
        raise WeightsError(f"no model can be made of {config}: {str(error).splitlines()[0]}") from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def tensor_problems(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], limit: int = 8
) -> list[str]:
    """How tensors differ from those that there should be, by name and shape."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    problems = [
        f"{what}: {', '.join(names[:limit])}{f' and {len(names) - limit} more' if len(names) > limit else ''}"
        for what, names in (("lacks", missing), ("holds what the model has not", unexpected))
        if names
    ]
    shapes = [
        f"{name} has the shape {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    return problems + shapes[:limit] + ([f"and {len(shapes) - limit} more shapes"] if len(shapes) > limit else [])


def _fill_buffers(module: nn.Module) -> None:
    """Give a module its buffers that are in no ``state_dict``, such as rotary tables."""
    if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()  # type: ignore[operator]


def values_of(config: GPTConfig) -> dict[str, Any]:
    """All values of a config; those of a nested one have its name before a dot."""
    values: dict[str, Any] = {}
    for name, value in asdict(config).items():
        nested = {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        values |= nested
    values |= {"num_kv_heads": config.kv_heads, "mlp_dim": config.mlp_width, "head_dim": config.head_width}
    return values if config.moe is None else values | {"moe.expert_dim": config.expert_width}


def differences(config: GPTConfig, saved: GPTConfig) -> list[str]:
    """Where a model of ``config`` cannot take the weights of a model of ``saved``, with both values."""
    wanted, found = values_of(config), values_of(saved)
    free = _FREE | ({"mlp_dim"} if 0 < config.num_moe_layers == config.num_layers else set())  # no block is that wide
    return [
        f"{name}={wanted.get(name)!r}, and the weights are those of a model with {name}={found.get(name)!r}"
        for name in dict.fromkeys((*wanted, *found))
        if name not in free and wanted.get(name) != found.get(name)
    ]
