"""Builds the module that a recipe trains, to check what can be known only of its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule


def parameter_names(model: Mapping[str, Any]) -> list[str] | None:
    """Names of the parameters of a module, in their order.

    Args:
        model: the key of that name in a recipe of ``asyncpp fit``; known to be accepted by its parser.

    Returns:
        ``None`` where the module cannot be built outside a training.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    try:
        # Without memory for the weights, as far as the module follows.
        with torch.device("meta"), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: LightningModule = parser.instantiate_classes(parser.parse_object({"model": dict(model)})).model
            module.configure_model()
    except Exception:  # the user's code; the training will tell what is wrong with it, if anything is
        return None
    return [name for name, _ in module.named_parameters()]
