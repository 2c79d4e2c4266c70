"""The model of a checkpoint that the command is given: its hyper-parameters, and how they differ from a recipe's."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import StorageError, local_path
from lightning_asyncpp.storage.sharded import is_sharded
from lightning_asyncpp.storage.whole import missing, unreadable
from lightning_asyncpp.trainer.checkpoint.saved_arguments import (
    ARGUMENTS,
    CLASS,
    INSTANTIATOR,
    SAVED_CLASS,
    imported,
    never_saved,
    refusals,
    same_class,
)

_CHOSEN_BY_THE_TRAINER = ("best", "last", "hpc")
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
    return {name: _without_removed(value) for name, value in found.items() if name != INSTANTIATOR}


def _without_removed(value: Any) -> Any:
    """Hyper-parameters without arguments that a class of this package has no more, where they changed nothing."""
    if isinstance(value, list):
        return [_without_removed(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    kept = {name: _without_removed(entry) for name, entry in value.items()}
    class_path, given = str(kept.get(CLASS)), kept.get(ARGUMENTS)
    if class_path.startswith(_OURS) and isinstance(given, Mapping):
        removed = getattr(imported(class_path), "removed", {})
        kept[ARGUMENTS] = {
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
    try:
        if path is None or (path.is_dir() and not is_sharded(path)):  # a folder may be another strategy's checkpoint
            return None
        is_there = path.exists()
    except OSError as error:
        assert path is not None
        raise ConfigurationError(f"--ckpt_path: {unreadable(path, error)}") from error
    if not is_there:
        raise ConfigurationError(f"--ckpt_path: {missing(path)}")
    return path


def model_arguments(
    hyper_parameters: Mapping[str, Any], given: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """What a checkpoint says of the ``model`` section, without what a run may change as it goes on.

    Args:
        hyper_parameters: the checkpoint's, of a model of the class that is asked for.
        given: the section as recipe and command line have it.
        asked: the same, with defaults.
    """
    values = {name: value for name, value in hyper_parameters.items() if name != SAVED_CLASS}
    if SAVED_CLASS not in hyper_parameters:  # saved by a script: the class may not take all of them
        values = {name: value for name, value in values.items() if name in asked.get(ARGUMENTS, {})}
    cls = pydoc.locate(asked.get(CLASS) or "")
    may_change = never_saved(cls).union(getattr(cls, "may_change_on_resume", ()))
    chosen = may_change.intersection(given.get(ARGUMENTS, {}))
    values = {name: value for name, value in values.items() if name not in chosen}
    return {CLASS: asked.get(CLASS), "dict_kwargs": values}


def check_class(ckpt_path: str, hyper_parameters: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another class; a class that it names is not even imported.

    Raises:
        ConfigurationError: it is one.
    """
    saved = hyper_parameters.get(SAVED_CLASS)
    if saved is not None and not same_class(asked.get(CLASS), saved):
        raise another_model(ckpt_path, list(differences(asked, asked, {CLASS: saved})), False)


def check_arguments(ckpt_path: str, arguments: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse arguments that could make something run, or that no such class saves.

    Args:
        ckpt_path: of the checkpoint.
        arguments: its, of :func:`model_arguments`.
        asked: the section as recipe, command line and defaults have it, in the plain values of a checkpoint.

    Raises:
        ConfigurationError: there are some; with what to do.
    """
    cls = pydoc.locate(asked.get(CLASS) or "")
    if problems := list(refusals(cls, arguments["dict_kwargs"], asked.get(ARGUMENTS, {}))):
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigurationError(
            f"--ckpt_path {ckpt_path}: a checkpoint is data and names nothing to run, so these of its hyper-parameters"
            f" are not taken:{lines}\nGive them in the recipe or on the command line (--model.init_args.NAME) if you"
            " know them; with --weights_only=false all are taken, and whatever code the file holds is run"
        )


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
