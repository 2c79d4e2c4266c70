"""The model of a checkpoint that the command is given: its hyper-parameters, and how they differ from a recipe's."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import StorageError, local_path
from lightning_asyncpp.storage.sharded import is_sharded
from lightning_asyncpp.storage.whole import missing

_CHOSEN_BY_THE_TRAINER = ("best", "last", "hpc")
_CLASS = "_class_path"  # which LightningCLI saves among the hyper-parameters
_NOT_AN_ARGUMENT = "_instantiator"
_OURS = "lightning_asyncpp."


def saved_hyper_parameters(ckpt_path: str | None, weights_only: bool | None = None) -> dict[str, Any]:
    """Read the model's hyper-parameters from a checkpoint; none where there are none, or the Trainer finds the file.

    Args:
        ckpt_path: as the Trainer takes it: a path, a URL, ``"last"``, ...
        weights_only: False runs code that the file may hold; anything else refuses it.

    Raises:
        ConfigurationError: the file is not there, is damaged, or is no checkpoint.
    """
    path = _local_checkpoint(ckpt_path)
    if path is None:
        return {}
    try:
        content = load(path, weights_only)
    except StorageError as error:
        raise ConfigurationError(f"--ckpt_path: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"--ckpt_path: {path} is no checkpoint: it holds a {type(content).__name__}")
    found = content.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(f"--ckpt_path: {path} is damaged or no checkpoint: its hyper-parameters have no names")
    return {name: _without_removed(value) for name, value in found.items() if name != _NOT_AN_ARGUMENT}


def _without_removed(value: Any) -> Any:
    """Hyper-parameters without arguments that a class of this package has no more, where they changed nothing."""
    if isinstance(value, list):
        return [_without_removed(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    kept = {name: _without_removed(entry) for name, entry in value.items()}
    class_path, given = str(kept.get("class_path")), kept.get("init_args")
    if class_path.startswith(_OURS) and isinstance(given, Mapping):
        removed = getattr(pydoc.locate(class_path), "removed", {})
        kept["init_args"] = {
            name: entry for name, entry in given.items() if name not in removed or entry != removed[name]
        }
    return kept


def _local_checkpoint(ckpt_path: str | None) -> Path | None:
    """The file or folder to look into, where it is one of this package's forms and on this machine."""
    if not ckpt_path or ckpt_path in _CHOSEN_BY_THE_TRAINER or ckpt_path.startswith("registry"):
        return None
    try:
        path = local_path(ckpt_path)
    except (ImportError, ValueError) as error:  # of a URL: a package is missing, or nobody knows its protocol
        raise ConfigurationError(f"--ckpt_path {ckpt_path}: {error}") from error
    if path is None or (path.is_dir() and not is_sharded(path)):  # a folder may be another strategy's checkpoint
        return None
    if not path.exists():
        raise ConfigurationError(f"--ckpt_path: {missing(path)}")
    return path


def model_arguments(
    hyper_parameters: Mapping[str, Any], given: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """What a checkpoint says of the ``model`` section, without what a run may change as it goes on.

    Args:
        hyper_parameters: the checkpoint's.
        given: the section as recipe and command line have it.
        asked: the same, with defaults.
    """
    values = dict(hyper_parameters)
    saved_class = values.pop(_CLASS, None)
    if saved_class is None:  # saved by a script: the class is the one asked for, which may not take all of them
        values = {name: value for name, value in values.items() if name in asked.get("init_args", {})}
    chosen = _may_change(asked.get("class_path")).intersection(given.get("init_args", {}))
    values = {name: value for name, value in values.items() if name not in chosen}
    return {"class_path": saved_class or asked.get("class_path"), "dict_kwargs": values}


def _may_change(class_path: str | None) -> frozenset[str]:
    """The arguments of a module that may be others when a run goes on, if its class says so."""
    return frozenset(getattr(pydoc.locate(class_path or ""), "may_change_on_resume", ()))


def differences(given: Any, asked: Any, saved: Any, name: str = "model") -> Iterator[str]:
    """Say what was asked for otherwise than it was saved, an argument each.

    Args:
        given: what recipe and command line have; defaults, which nobody asked for, are not compared.
        asked: the same, with defaults.
        saved: the same, with the checkpoint's values over them.
        name: of all this.
    """
    if not all(isinstance(value, Mapping) for value in (given, asked, saved)):
        if asked != saved:
            yield f"{name}: {asked!r} was asked for, and the checkpoint has {saved!r}"
        return
    same_class = asked.get("class_path") == saved.get("class_path")
    for key in given if same_class else ("class_path",):  # arguments of two classes cannot be compared
        yield from differences(given.get(key), asked.get(key), saved.get(key), f"{name}.{key}")


def another_model(ckpt_path: str, problems: list[str], has_initial_weights: bool) -> ConfigurationError:
    """The error to raise where training would go on with another model than was asked for."""
    lines = "".join(f"\n  - {problem}" for problem in problems)
    weights = " (--model.init_args.initial_weights begins with weights alone)" if has_initial_weights else ""
    return ConfigurationError(
        f"--ckpt_path {ckpt_path} is of another model than the recipe and the command line ask for:{lines}\nLeave these"
        " arguments out, or give them the checkpoint's values, to go on with its model; leave --ckpt_path out to train"
        f" the other one{weights}"
    )
