"""The name of a tensor of a GPT in the files of a class of `transformers`."""

from __future__ import annotations

import re

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.errors import WeightsError
from lightning_asyncpp.models.hf.architectures import EXPERT, LAYER, Architecture

_BLOCK = re.compile(r"^blocks\.(\d+)\.")


def name_there(architecture: Architecture, name: str, config: GPTConfig) -> str | list[str]:
    """What the files call a tensor: a name, or one per expert for what a GPT holds stacked for all of them.

    Args:
        architecture: whose files.
        name: of the tensor in the GPT.
        config: the GPT's.

    Raises:
        WeightsError: the class has no such tensor.
    """
    block = _BLOCK.match(name)
    ours = name if block is None else f"blocks.{LAYER}.{name[block.end() :]}"
    if ours not in architecture.tensors:
        raise WeightsError(f"a {architecture.class_name} has nothing that the tensor {name} could be")
    theirs = architecture.tensors[ours]
    if block is not None:
        theirs = theirs.replace(LAYER, block.group(1))
    if EXPERT not in theirs:
        return theirs
    return [theirs.replace(EXPERT, str(expert)) for expert in range(number_of_experts(config))]


def number_of_experts(config: GPTConfig) -> int:
    """Experts per layer; 0 for a dense model."""
    return 0 if config.moe is None else config.moe.num_experts
