"""``asyncpp export`` and ``import``: convert a checkpoint to a folder that `transformers` loads, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor, nn

from lightning_asyncpp.models import GPT, SavedGPT, WeightsError, open_saved
from lightning_asyncpp.models.hf import new_folder, read_hf, write_hf
from lightning_asyncpp.storage import StorageError, is_sharded, load, save_file
from lightning_asyncpp.tools.generate import DTYPES, find_tokenizer
from lightning_asyncpp.tools.parsers import export_parser, import_parser
from lightning_asyncpp.trainer.hf_model import transformers_package, with_adapters
from lightning_asyncpp.trainer.hf_module import SAVED

_MODEL, _ADAPTED, _BASE = "model.", "base_model.model.", ".base_layer."
ADAPTER = "adapter"


@dataclass(frozen=True)
class TrainedHF:
    """Model of `transformers` that an ``HFModule`` has trained; its tensors are memory-mapped from files."""

    origin: str
    """Path of the checkpoint, for messages."""
    task: str
    """Name of the model's auto class in `transformers`."""
    config: Mapping[str, Any]
    """Config of the model, in plain values."""
    lora: Mapping[str, Any] | None
    """Settings of the LoRA adapters; ``None`` without adapters."""
    model_id: str
    """Folder or name of the pretrained model with which the training began."""
    weights: Mapping[str, Tensor]
    """Tensors by their names in the model's ``state_dict``."""


def read_trained(path: Path) -> TrainedHF | None:
    """Read a checkpoint of ``HFModule``; return ``None`` if the path is something else or cannot be read."""
    if not path.is_file() and not is_sharded(path):
        return None
    try:
        content = load(path)
    except StorageError:
        return None
    entry = content.get(SAVED) if isinstance(content, Mapping) else None
    if not isinstance(entry, Mapping):
        return None
    weights = {name[len(_MODEL) :]: tensor for name, tensor in content["state_dict"].items() if name.startswith(_MODEL)}
    return TrainedHF(str(path), entry["task"], entry["config"], entry["lora"], entry["model_id"], weights)


def export_hf(
    trained: TrainedHF, folder: Path, dtype: torch.dtype | None, tokenizer: str | None, lora: str
) -> tuple[str, bool]:
    """Write a folder with config, weights in safetensors, and tokenizer.

    Args:
        trained: the model.
        folder: new or empty folder; it appears when it is complete.
        dtype: dtype of the weights; ``None``: as in the checkpoint.
        tokenizer: folder or name of the tokenizer; ``None``: the tokenizer of ``trained.model_id`` if it is on this
            machine.
        lora: ``"merged"`` merges adapters into the model's weights, ``"adapter"`` writes only the adapters.

    Returns:
        Name of the model's class, and whether a tokenizer was written.

    Raises:
        WeightsError: the weights do not fit the config, the folder is not empty, there is no such tokenizer, or the
            model has no adapters to write.
    """
    if lora == ADAPTER and trained.lora is None:
        raise WeightsError(f"--lora adapter: {trained.origin} was trained without adapters; leave the option out")
    with new_folder(folder) as temporary:
        model = build(trained, merge=lora != ADAPTER)
        if dtype is not None:
            model.to(dtype)
        model.save_pretrained(temporary)  # type: ignore[operator]
        has_tokenizer = _save_tokenizer(trained, tokenizer, temporary)
    return type(model).__name__, has_tokenizer


def build(trained: TrainedHF, merge: bool = True) -> nn.Module:
    """Build the model and load its weights.

    Args:
        trained: config and weights of the model.
        merge: whether to merge adapters into the model's weights.

    Raises:
        WeightsError: the weights do not fit the config.
    """
    transformers = transformers_package()
    values = {name: value for name, value in trained.config.items() if name != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(trained.config["model_type"], **values)
        with torch.device("meta"):
            kind = type(getattr(transformers, trained.task).from_config(config))
        plain = _without_adapters(trained.weights) if trained.lora is not None else dict(trained.weights)
        model, info = kind.from_pretrained(
            None, config=config, state_dict=plain, dtype=_dtype_of(plain), output_loading_info=True
        )
        problems = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]))
        if trained.lora is not None and not problems:
            model = _adapted(model, trained, merge)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(f"the weights in {trained.origin} do not fit its config: {error}") from error
    if problems:
        raise WeightsError(
            f"the weights in {trained.origin} do not fit its config; for example: {', '.join(problems[:6])}"
        )
    with suppress(OSError, ValueError):
        generation = transformers.GenerationConfig
        model.generation_config = generation.from_pretrained(trained.model_id, local_files_only=True)
    return model  # type: ignore[no-any-return]


def _adapted(model: nn.Module, trained: TrainedHF, merge: bool) -> Any:
    assert trained.lora is not None
    adapted: Any = with_adapters(model, trained.lora, trained.task)
    adapted.load_state_dict(trained.weights)
    adapted.peft_config["default"].base_model_name_or_path = trained.model_id
    return adapted.merge_and_unload() if merge else adapted


def _without_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base model's weights, under the names that they have without adapters."""
    found = {}
    for name, tensor in weights.items():
        plain = name.removeprefix(_ADAPTED).replace(_BASE, ".")
        if "lora_" not in plain and ".modules_to_save." not in plain:
            found[plain.replace(".original_module.", ".")] = tensor
    return found


def _dtype_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    return next((t.dtype for t in weights.values() if t.is_floating_point()), torch.float32)


def _save_tokenizer(trained: TrainedHF, given: str | None, folder: Path) -> bool:
    auto = transformers_package().AutoTokenizer
    try:
        # A checkpoint may come from someone else, so a tokenizer that only the checkpoint names is not downloaded.
        tokenizer = auto.from_pretrained(given or trained.model_id, local_files_only=given is None)
    except (OSError, ValueError) as error:
        if given is not None:
            raise WeightsError(f"--tokenizer {given}: {next(iter(str(error).splitlines()), error)}") from error
        return False
    tokenizer.save_pretrained(folder)
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder, and print the model's class and size."""
    arguments = export_parser().parse_args(argv)
    folder = Path(arguments.output).expanduser()
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    if (trained := read_trained(Path(arguments.model).expanduser())) is not None:
        name, has_tokenizer = export_hf(trained, folder, dtype, arguments.tokenizer, arguments.lora)
        print(f"{name} of {sum(t.numel() for t in trained.weights.values()):,} parameters: {folder}")
        if not has_tokenizer:
            print(f"No tokenizer written: {trained.model_id} has none on this machine. Name one with --tokenizer.")
        return
    saved = open_saved(arguments.model)
    tokenizer = find_tokenizer(saved, arguments.tokenizer)
    files = {} if tokenizer is None else tokenizer.files(saved.config.context_length)
    end = None if tokenizer is None else tokenizer.end_of_document
    architecture = write_hf(saved, folder, dtype, end=end, files=files)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(saved.config).parameters())
    print(f"{architecture.class_name} of {parameters:,} parameters: {folder}")
    if tokenizer is None:
        print("No tokenizer written: the checkpoint has none. Name one with --tokenizer.")


def import_folder(argv: Sequence[str] | None = None) -> None:
    """Print the model section of a recipe, and write a checkpoint if requested."""
    arguments = import_parser().parse_args(argv)
    saved = read_hf(Path(arguments.folder).expanduser())
    saved.check()
    if arguments.output is not None:
        write_checkpoint(saved, Path(arguments.output).expanduser())
    print("# The model of a recipe; `initial_weights` may be the folder or the checkpoint.")
    config = asdict(saved.config)
    shown = {"config": config, "initial_weights": arguments.output or arguments.folder}
    print(yaml.safe_dump({"model": {"class_path": "lightning_asyncpp.GPTModule", "init_args": shown}}, sort_keys=False))


def write_checkpoint(saved: SavedGPT, path: Path) -> None:
    """Write weights for ``GPTModule`` as a checkpoint of the Trainer without a training state.

    Raises:
        WeightsError: the file exists already.
        StorageError: the file cannot be written.
    """
    if path.exists():
        raise WeightsError(f"{path} exists already; name another file, or remove it")
    content = {
        "state_dict": {f"model.{name}": saved.tensors[name].float() for name in saved.shapes},
        # Without the class, LightningCLI would take the config for arguments of LightningModule.
        "hyper_parameters": {"_class_path": "lightning_asyncpp.GPTModule", "config": asdict(saved.config)},
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
    }
    if saved.tokenizer is not None:
        content["TextDataModule"] = {"tokenizer": saved.tokenizer}
    save_file(content, path)
