"""Hooks on parameters, which do not fire in a pipeline: forwards run on the tensors of a weight version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_asyncpp.private_names import required

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def parameter_hook_problems(model: nn.Module, name: str = "self.model") -> list[str]:
    """Parameters of a model that somebody has hooked, with the mend.

    Args:
        model: what is to be trained.
        name: how the user calls it.

    Raises:
        PrivateNameError: torch keeps them elsewhere by now.
    """
    hooked = [n for n, p in model.named_parameters() if p.requires_grad and any(_is_users(h) for h in _hooks_of(p))]
    if not hooked:
        return []
    return [
        f"hooks on parameters of {name} ({', '.join(hooked[:4])}{', ...' if len(hooked) > 4 else ''}) would not fire"
        " under a pipeline (register_hook, register_post_accumulate_grad_hook, wandb.watch): leave them out, look at"
        " gradients in on_before_optimizer_step of a Trainer, or in optimizer.register_step_pre_hook"
    ]


def _hooks_of(parameter: nn.Parameter) -> Iterator[Any]:
    for kind in _KINDS:
        yield from (required(parameter, kind, "refuse hooks on parameters, which would not fire") or {}).values()


def _is_users(hook: Any) -> bool:
    """Whether it is no guard that an engine of this process left behind."""
    return not str(getattr(hook, "__module__", "")).startswith("lightning_asyncpp.")
