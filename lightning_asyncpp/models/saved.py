"""Saved GPTs: config, weights under the names of the ``state_dict``, and tokenizer.

Checkpoints of the Trainer and of Fabric are read without running any code in them.
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

# Fields of a config that only training uses.
TRAINING_ONLY = frozenset({"dropout", "moe.balance_loss", "moe.balance_bias_rate"})
# Fields of a config that may differ between two models with the same weights.
_FREE = TRAINING_ONLY | {"context_length", "init_std"}

_MARK = "embedding.token.weight"  # an entry of the state_dict of a GPT and of no other model
_HYPER_PARAMETERS = "hyper_parameters"
_DATA_HYPER_PARAMETERS = "datamodule_hyper_parameters"


class WeightsError(ValueError):
    """Error: saved weights cannot be read or used. The message names the file and says what to do."""

    @classmethod
    def from_problems(cls, what: str, problems: Sequence[str]) -> WeightsError:
        """Return an error whose message is ``what``, followed by one line per problem."""
        return cls(f"{what}:\n" + "\n".join(f"  - {problem}" for problem in problems))


@dataclass(frozen=True)
class SavedGPT:
    """Saved GPT whose tensors stay in their files until they are read."""

    origin: str
    """Path of the model, for messages."""
    config: GPTConfig
    """Shape of the model."""
    tensors: Mapping[str, Tensor]
    """Tensors by their names in the model's ``state_dict``, each read when it is accessed."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by the same names, known without reading tensors."""
    tokenizer: str | None = None
    """Definition of the tokenizer: ``"byte"``, or the content of a tokenizer.json; ``None`` if it was not saved."""

    def check(self) -> None:
        """Compare names and shapes with those of a GPT of this config.

        Raises:
            WeightsError: names or shapes differ; the message lists the differences.
        """
        problems = tensor_problems(self.shapes, expected_shapes(self.config))
        if problems:
            raise WeightsError.from_problems(f"the weights in {self.origin} do not fit its config", problems)

    def build(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> GPT:
        """Build the model in evaluation mode; weights that need no conversion are mapped from their file.

        Args:
            device: device of the model.
            dtype: dtype of the weights.

        Raises:
            WeightsError: names or shapes differ, as in :meth:`check`.
        """
        self.check()
        with torch.device("meta"):
            model = GPT(self.config)
        model.load_state_dict({name: self.tensors[name].float() for name in self.shapes}, assign=True)
        model.head.tie_weights()
        for module in model.modules():
            _fill_buffers(module)
        # Each module converts its own tensors, since some modules keep tensors in fp32.
        return model.to(device, dtype).eval().requires_grad_(False)


def expected_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the ``state_dict`` of a GPT, by name.

    Raises:
        WeightsError: torch cannot make tensors of such sizes.
    """
    try:
        with torch.device("meta"):
            model = GPT(config)
    except (TypeError, OverflowError, RuntimeError) as error:
        raise WeightsError(f"no model can be made of {config}: {str(error).splitlines()[0]}") from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def tensor_problems(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the first eight differences between found and expected tensors, and a count of the rest."""
    problems = [f"lacks: {name}" for name in expected if name not in found]
    problems += [f"has a tensor that the model lacks: {name}" for name in found if name not in expected]
    problems += [
        f"{name} has the shape {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    return problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])


def _fill_buffers(module: nn.Module) -> None:
    """Fill a module's buffers that are not in its ``state_dict``, such as rotary tables."""
    if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()  # type: ignore[operator]


def values_of(config: GPTConfig) -> dict[str, Any]:
    """Return all values of a config by name, with defaults filled in; nested values are named ``outer.inner``."""
    values: dict[str, Any] = {}
    for name, value in asdict(config).items():
        nested = {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        values |= nested
    values |= {"num_kv_heads": config.kv_heads, "mlp_dim": config.mlp_width, "head_dim": config.head_width}
    return values if config.moe is None else values | {"moe.expert_dim": config.expert_width}


def differences(config: GPTConfig, saved: GPTConfig) -> list[str]:
    """Return the differences that keep a model of ``config`` from loading the weights of a model of ``saved``."""
    wanted, found = values_of(config), values_of(saved)
    free = _FREE | ({"mlp_dim"} if 0 < config.num_moe_layers == config.num_layers else set())  # no block is dense
    return [
        f"{name}={wanted.get(name)!r}, and the weights are those of a model with {name}={found.get(name)!r}"
        for name in dict.fromkeys((*wanted, *found))
        if name not in free and wanted.get(name) != found.get(name)
    ]


def open_saved(path: str | Path) -> SavedGPT:
    """Open a checkpoint, in one file or sharded, or a folder with config.json and safetensors.

    Raises:
        WeightsError: the path is not one of these, or does not contain a GPT.
    """
    path = Path(path).expanduser()
    if path.is_file() or is_sharded(path):
        return read_checkpoint(path)
    if (path / "config.json").is_file():
        from lightning_asyncpp.models.hf import read_hf  # imported late, since it imports this module

        return read_hf(path)
    what = "is a folder without index.json and config.json" if path.is_dir() else "is neither a checkpoint nor a folder"
    raise WeightsError(f"{path} {what}; models of a hub have to be downloaded first")


def check_start(config: GPTConfig, path: str | Path) -> None:
    """Check that a model of a config can start from the weights at ``path``.

    Raises:
        WeightsError: the weights cannot be read, or do not fit the model; the message lists the differences.
    """
    saved = open_saved(path)
    if problems := differences(config, saved.config):
        raise WeightsError.from_problems(f"the model cannot start from {path}", problems)
    saved.check()


def start_from(model: GPT, path: str | Path) -> None:
    """Load a model's initial weights from a checkpoint, or from a folder of `transformers`, in the model's dtype.

    A layer on the meta device loads its tensors when its ``reset_parameters()`` is called, so that in a pipeline every
    stage reads only the tensors of its layers. A layer with real weights loads its tensors at once.

    Args:
        model: model whose weights are replaced.
        path: path of the checkpoint or folder.

    Raises:
        WeightsError: the weights do not fit the model; the message lists the differences.
    """
    check_start(model.config, path)
    names = {id(module): name for name, module in model.named_modules()}
    for unit in model.pipeline_layers():
        take = partial(_take, unit, names[id(unit)], path)
        if any(parameter.is_meta for parameter in unit.parameters()):
            # Overrides the class's method, since materialising a layer calls reset_parameters() and nothing else.
            unit.__dict__["reset_parameters"] = take
        else:
            take()


@torch.no_grad()
def _take(unit: nn.Module, name: str, path: str | Path) -> None:
    """Initialise a layer, and replace its random weights by the saved ones."""
    type(unit).reset_parameters(unit)  # type: ignore[attr-defined]  # fills buffers that are not saved
    tensors = open_saved(path).tensors
    unit.load_state_dict({own: tensors[f"{name}.{own}"] for own in unit.state_dict()})


def read_checkpoint(path: Path) -> SavedGPT:
    """Read a Trainer's checkpoint of a ``GPTModule``, or Fabric's checkpoint of a GPT; tensors are memory-mapped.

    Args:
        path: path of the file, or of a sharded checkpoint's folder.

    Raises:
        WeightsError: the file cannot be read, or does not hold a GPT and its shape: the module's hyper-parameters, or
            ``"config"`` in a checkpoint of ``fabric.save``.
    """
    content = _load(path)
    prefix, state = _state_of_gpt(path, content)
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and name.startswith(prefix)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return SavedGPT(str(path), _config(path, _recorded_values(content)), tensors, shapes, _tokenizer(content))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = load(path)
    except StorageError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}, and a checkpoint is a dictionary")
    return content


def _state_of_gpt(path: Path, content: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Find the ``state_dict`` of a GPT; return the prefix of its names, and the ``state_dict`` itself."""
    values = [content.get("state_dict"), content, *content.values()]
    candidates = [value for value in values if isinstance(value, Mapping)]
    for state in candidates:
        for prefix in ("", "model."):
            if f"{prefix}{_MARK}" in state:
                return prefix, state
    entries = ", ".join(map(str, [*content][:8]))
    raise WeightsError(
        f"{path} holds no GPT of this package: its entries are {entries}. asyncpp export takes checkpoints of GPTModule"
        " and HFModule. To write the weights of any other model, run asyncpp checkpoint convert"
        f" {shlex.quote(str(path))} weights.safetensors --to weights"
    )


def _recorded_values(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields of the model's config, if the checkpoint has them."""
    values = content.get("config")
    hyper_parameters = content.get(_HYPER_PARAMETERS)
    if isinstance(hyper_parameters, Mapping):
        values = hyper_parameters.get("config", values)
    return values if isinstance(values, Mapping) else None


def _config(path: Path, values: Mapping[str, Any] | None) -> GPTConfig:
    if values is None:
        raise WeightsError(
            f'{path} says nothing of the model\'s shape: it has no hyper-parameters of a GPTModule and no "config"; '
            'save the config with fabric.save(path, {"model": model, "config": dataclasses.asdict(config)})'
        )
    try:
        return GPTConfig(**values)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{path} holds the config of another model: {error}") from error


def _tokenizer(content: Mapping[str, Any]) -> str | None:
    """Return the tokenizer's definition, which ``TextDataModule`` or a user of ``fabric.save`` has saved."""
    arguments = (_HYPER_PARAMETERS, _DATA_HYPER_PARAMETERS)
    for value in (content, *(value for name, value in content.items() if name not in arguments)):
        if isinstance(value, Mapping) and isinstance(definition := value.get("tokenizer"), str):
            return definition
    return None
