"""Gradients that a user's step takes by itself, and hooks on parameters: what cannot be had in a pipeline is refused.

The input lives on the first stage and the loss on the last, whose step is over before the backward of the others: a
gradient that would have to pass other stages cannot be had there. Hooks on parameters do not fire, because forwards run
on the tensors of a weight version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.private_names import required

_UNUSED = "appears to not have been used in the graph"  # what torch.autograd.grad says of what a loss does not reach
_MEND = (
    "use a strategy that holds the model in one process (delayed_gradient, or Lightning's own), or compute the term"
    " inside one layer of the model and add it with lightning_asyncpp.auxiliary.add_auxiliary_loss"
)
_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def refuse_input_gradients(args: tuple, kwargs: Mapping[str, Any], model: str) -> None:
    """Refuse arguments of the model that require a gradient: none would ever come.

    Args:
        args, kwargs: of the call.
        model: how the user calls it.

    Raises:
        ConfigurationError: some do, with their names.
    """
    named = named_arguments(args, kwargs)
    found = [name for name, value in named if any(tensor.requires_grad for tensor in tensors_of(value))]
    if found:
        raise ConfigurationError(
            f"an argument of {model}(...) requires a gradient ({', '.join(found[:4])}: requires_grad_(), for a penalty"
            " or forces, or it was computed from a trained parameter), but the input lives on the first stage of the"
            " pipeline and the loss on the last: no gradient of the input can be had in the step, and none is trained"
            " through. Let the model compute it from something else (input_ids in place of inputs_embeds), or compute"
            f" it under torch.no_grad() if nothing of it is trained; else {_MEND}"
        )


def named_arguments(args: tuple, kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What messages call the arguments of a call, and their values."""
    return [*((f"the one at position {place}", value) for place, value in enumerate(args)), *kwargs.items()]


class GradientsInStep:
    """Watches the step of the last of several stages.

    Args:
        model: how the user calls it, for messages.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []

    def watch(self, output: Any) -> None:
        """Refuse a backward from behind the output of the model into it, as long as the step runs."""
        nodes = {tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None}
        self._handles += [node.register_prehook(self._refuse_backward) for node in nodes]

    @contextmanager
    def within(self) -> Iterator[None]:
        """The step runs meanwhile.

        Raises:
            ConfigurationError: it asked for the gradient of something that is not on this stage.
        """
        grad = torch.autograd.grad

        def checked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
            if any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in inputs):
                raise ConfigurationError(self._of_parameters())
            return grad(outputs, inputs, *args, **kwargs)

        torch.autograd.grad = checked  # with allow_unused=True it would return None for a parameter, and no word
        try:
            yield
        except RuntimeError as error:
            if _UNUSED in str(error):
                raise ConfigurationError(self._of_input()) from error
            raise
        finally:
            torch.autograd.grad = grad
            while self._handles:
                self._handles.pop().remove()

    def _of_parameters(self) -> str:
        return (
            f"torch.autograd.grad(..., parameters) in the step: this stage of the pipeline holds some layers of"
            f" {self._model} alone, and runs them on its own weight versions, so there are no gradients of parameters"
            f"; {_MEND}; for norms of gradients, look at them in on_before_optimizer_step"
        )

    def _of_input(self) -> str:
        return (
            "torch.autograd.grad in the step, with respect to something that the loss does not depend on: the input"
            " is on the first stage of the pipeline and the loss on the last, and forwards run on weight versions, not"
            f" on the parameters, so gradients of either cannot be had in the step; {_MEND}"
        )

    def _refuse_backward(self, *_: Any) -> None:
        raise ConfigurationError(
            f"a backward through {self._model} in the step (loss.backward(), manual_backward, or torch.autograd.grad"
            " with respect to what is inside): the pipeline runs the backward of every micro-batch itself, on all"
            f" stages, after the step; return the loss, and leave backward out; a term that needs gradients: {_MEND}"
        )


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
