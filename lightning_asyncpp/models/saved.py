"""A GPT that was saved: its config, its weights under the names of its ``state_dict``, its tokenizer.

Checkpoints that the Trainer and Fabric write are read without running code that they may hold.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.gpt import GPT
from lightning_asyncpp.storage import StorageError, is_sharded, load

# Of no meaning to a model that was trained.
TRAINING_ONLY = frozenset({"dropout", "moe.balance_loss", "moe.balance_bias_rate"})
# Two models that differ in these can have the same weights.
_FREE = TRAINING_ONLY | {"context_length", "init_std"}

_MARK = "embedding.token.weight"  # what the state_dict of a GPT has and no other model
_COMPILED = "_orig_mod."
_HYPER_PARAMETERS = "hyper_parameters"
_DATA_HYPER_PARAMETERS = "datamodule_hyper_parameters"


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
    """How tensors differ from those that there should be, the first of them by name and shape."""
    problems = [f"lacks: {name}" for name in expected if name not in found]
    problems += [f"holds what the model has not: {name}" for name in found if name not in expected]
    problems += [
        f"{name} has the shape {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    return problems[:limit] + ([f"and {len(problems) - limit} more"] if len(problems) > limit else [])


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
        from lightning_asyncpp.models.hf import read_hf  # which imports this file

        return read_hf(path)
    what = "is a folder without index.json and config.json" if path.is_dir() else "is no checkpoint, and no folder"
    raise WeightsError(f"{path} {what}; models of a hub have to be downloaded first")


def start_problems(config: GPTConfig, path: str | Path) -> list[str]:
    """What keeps a model of a config from starting with the weights at ``path``: files, sizes, tensors."""
    try:
        saved = open_saved(path)
        problems = differences(config, saved.config)
        if not problems:
            saved.check()
    except (WeightsError, ImportError, OSError) as error:
        return [str(error)]
    return problems


def start_from(model: GPT, path: str | Path) -> None:
    """Let a model start with the weights of a checkpoint, or of a folder of `transformers`, in fp32.

    A unit that is on the meta device takes them when its ``reset_parameters()`` is called, from its own tensors alone:
    under a pipeline every stage reads what it holds. A unit with real weights takes them at once.

    Args:
        model: whose weights are replaced.
        path: the checkpoint or folder.

    Raises:
        WeightsError: the weights are not those of such a model; all differences are named.
    """
    if problems := start_problems(model.config, path):
        raise WeightsError.from_problems(f"the model cannot start from {path}", problems)
    names = {id(module): name for name, module in model.named_modules()}
    for unit in model.pipeline_layers():
        take = partial(_take, unit, names[id(unit)], path)
        if any(parameter.is_meta for parameter in unit.parameters()):
            # In the place of the method of its class: whoever materialises a unit calls it, and nothing else.
            unit.__dict__["reset_parameters"] = take
        else:
            take()


@torch.no_grad()
def _take(unit: nn.Module, name: str, path: str | Path) -> None:
    """Initialise a unit, and put the saved tensors in the place of the random ones."""
    type(unit).reset_parameters(unit)  # type: ignore[attr-defined]  # tables and the like are in no file
    tensors = open_saved(path).tensors
    unit.load_state_dict({own: tensors[f"{name}.{own}"] for own in unit.state_dict()})


def read_checkpoint(path: Path, config: GPTConfig | None = None) -> SavedGPT:
    """Read a checkpoint of a ``GPTModule``, or one of Fabric that holds a GPT; its tensors are mapped, not copied.

    Args:
        path: the file, or the folder of a sharded one.
        config: the model's shape; ``None`` takes it from the checkpoint: from the module's hyper-parameters, or under
            ``"config"`` among what ``fabric.save`` was given.

    Raises:
        WeightsError: the file cannot be read, or holds something else; the message says what.
    """
    content = _load(path)
    prefix, state = _state_of_gpt(path, content)
    recorded = _recorded_values(content)
    if config is None:
        config = _config(path, recorded)
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in ((_plain(name), tensor) for name, tensor in state.items())
        if isinstance(tensor, Tensor) and name.startswith(prefix)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return SavedGPT(str(path), config, tensors, shapes, _tokenizer(content))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = load(path)
    except StorageError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}, and a checkpoint is a dictionary")
    return content


def _state_of_gpt(path: Path, content: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The ``state_dict`` that a GPT is in, and what its names begin with there."""
    values = [content.get("state_dict"), content, *content.values()]
    candidates = [value for value in values if isinstance(value, Mapping)]
    for state in candidates:
        for name in state:
            if (plain := _plain(name)) in (_MARK, f"model.{_MARK}"):
                return plain.removesuffix(_MARK), state
    entries = ", ".join(map(str, [*content][:8]))
    raise WeightsError(
        f"{path} holds no GPT of this package: its entries are {entries}. The weights of any model alone are written by"
        f" asyncpp checkpoint convert {shlex.quote(str(path))} weights.safetensors --to weights; asyncpp export takes"
        " checkpoints of GPTModule and HFModule"
    )


def _plain(name: object) -> str:
    return str(name).replace(_COMPILED, "")


def _recorded_values(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fields of the model's config, if the checkpoint has them."""
    values = content.get("config")
    hyper_parameters = content.get(_HYPER_PARAMETERS)
    if isinstance(hyper_parameters, Mapping):
        values = hyper_parameters.get("config", values)
    return values if isinstance(values, Mapping) else None


def _config(path: Path, values: Mapping[str, Any] | None) -> GPTConfig:
    if values is None:
        raise WeightsError(
            f'{path} says nothing of the model\'s shape: it has no hyper-parameters of a GPTModule and no "config"; '
            'save it, fabric.save(path, {"model": model, "config": dataclasses.asdict(config)})'
        )
    try:
        return GPTConfig(**values)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{path} holds the config of another model: {error}") from error


def _tokenizer(content: Mapping[str, Any]) -> str | None:
    """The definition that a ``TextDataModule`` wrote down, or that is among what ``fabric.save`` was given."""
    arguments = (_HYPER_PARAMETERS, _DATA_HYPER_PARAMETERS)
    for value in (content, *(value for name, value in content.items() if name not in arguments)):
        if isinstance(value, Mapping) and isinstance(definition := value.get("tokenizer"), str):
            return definition
    return None
