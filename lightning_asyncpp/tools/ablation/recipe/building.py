"""Builds what a recipe names, to check what shows only then: the module's parameters, values that a class refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_asyncpp.tools.instantiating import instantiated


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
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            module: LightningModule = instantiated(parser, "model", model)
            module.configure_model()
    except Exception:  # the user's code; the training will tell what is wrong with it, if anything is
        return None
    return [name for name, _ in module.named_parameters()]


def refusal(optimizer: Mapping[str, Any]) -> str | None:
    """Say what the class of an optimizer has against its values; it is built around a small parameter.

    Args:
        optimizer: class and arguments, as in a recipe of ``asyncpp fit``; known to be accepted by its parser.

    Returns:
        The message of the ``ValueError``; ``None`` if there is none, or if the optimizer cannot be built outside a
        training.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--optimizer", type=OptimizerCallable)
    try:
        instantiated(parser, "optimizer", optimizer)([("weight", nn.Parameter(torch.zeros(2, 2)))])
    except ValueError as error:
        return str(error)
    except Exception:  # it may want other parameters; the training will tell what is wrong, if anything is
        return None
    return None
