"""How the blocks of a GPT are computed: what is recomputed in the backward, and whether they are compiled.

Neither changes what a block computes, so neither belongs to its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_asyncpp.models.grouped_linear import loop_linear  # noqa: F401  (registers the operator named below)

ActivationCheckpointing = Literal["none", "block", "selective"]

_EXPENSIVE = (
    *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm", "lightning_asyncpp.loop_linear"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("aten._scaled_dot_product_attention_math", "aten._scaled_dot_product_fused_attention_overrideable"),
)
"""Operators whose results are kept; a release of torch that lacks one of them never calls it."""


class Execution:
    """Runs functions of blocks.

    Args:
        activation_checkpointing: ``"none"`` keeps all activations for the backward; ``"block"`` keeps the input of each
            block and computes the block once more in the backward; ``"selective"`` keeps the results of matrix products
            and of attention as well, and computes the rest once more.
        compile_blocks: compile each block with ``torch.compile``; a mapping has arguments for it.

    Raises:
        ValueError: an argument is wrong; all of them are named.
    """

    def __init__(
        self,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile_blocks: bool | Mapping[str, Any] = False,
    ) -> None:
        if problems := execution_problems(activation_checkpointing, compile_blocks):
            raise ValueError("GPT cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.activation_checkpointing = activation_checkpointing
        self.compile_options = dict(compile_blocks) if isinstance(compile_blocks, Mapping) else {}
        self.compiles = isinstance(compile_blocks, Mapping) or compile_blocks

    def get_compiler_config(self) -> Any:
        """The options of the compiler, as what ``torch.compile`` returns tells them; None where nothing is compiled."""
        if not self.compiles:
            return None
        return getattr(torch.compile(lambda: None, **self.compile_options), "get_compiler_config", lambda: None)()

    def run(self, function: Callable[..., Any], *args: Any, random: bool) -> Any:
        """Call ``function``, which has no side effects; ``random``: it draws random numbers."""
        how = self.activation_checkpointing if torch.is_grad_enabled() else "none"
        if self.compiles:
            return _compiled(function, how, random, self.compile_options)(*args)
        return _checkpointed(function, how, random)(*args)


def _checkpointed(function: Callable[..., Any], how: str, random: bool) -> Callable[..., Any]:
    if how == "none":
        return function
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def run(*args: Any) -> Any:
        return checkpoint(function, *args, **options)

    return run


_known: dict[tuple, Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any], how: str, random: bool, options: dict[str, Any]) -> Callable[..., Any]:
    """The compiled function, one for all blocks and models alike: their weights are its inputs, not part of it.

    It is kept here and not with a model, which may be copied or pickled.
    """
    key = function, how, random and how != "none", repr(sorted(options.items()))
    if key not in _known:
        _known[key] = torch.compile(_checkpointed(function, how, random), **options)
    return _known[key]


def execution_problems(activation_checkpointing: Any, compile_blocks: Any) -> list[str]:
    """What is wrong with these arguments, with the mend."""
    problems = []
    known = get_args(ActivationCheckpointing)
    if activation_checkpointing not in known:
        problems.append(f"activation_checkpointing={activation_checkpointing!r}: must be one of {', '.join(known)}")
    if not isinstance(compile_blocks, (bool, Mapping)):
        problems.append(
            f"compile_blocks={compile_blocks!r}: must be true, false, or a mapping of torch.compile's arguments, for "
            "instance {mode: max-autotune-no-cudagraphs}"
        )
    return problems


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(getattr(operator, "overloadpacket", operator))
    return CheckpointPolicy.MUST_SAVE if name in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


has_autocast: Callable[[str], bool] = torch.compiler.assume_constant_result(_has_autocast)
"""Whether ``torch.autocast`` knows a type of device; it does not know "meta". The compiler of torch 2.11 cannot look
into torch's own function."""
