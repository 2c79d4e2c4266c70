"""One optimizer for a whole model: Muon for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.muon import muon_step
from lightning_asyncpp.optim.newton_schulz import COEFFICIENTS
from lightning_asyncpp.optim.split import DEFAULT_ADAMW_NAMES, Algorithm, Split, split_parameters

_DTYPES = ("bfloat16", "float32", "float64")
_LR_ADJUSTMENTS = ("match_rms_adamw", "original")


class MuonAdamW(Optimizer):
    """Muon for hidden weight matrices and AdamW for embeddings, the output head, norms, biases and vectors.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; ``torch.optim.Muon``): the momentum of each
    matrix is orthogonalised by a few Newton-Schulz iterations, so that a step moves all directions alike. Which
    parameter goes where is the rule in :func:`lightning_asyncpp.optim.split.algorithm_for`.

    ``param_groups`` are always two, ``muon`` and ``adamw`` in this order, also where one is empty, so every pipeline
    stage shows schedulers and learning-rate monitors the same groups. All hyper-parameters are read from the groups at
    each step. A matrix is updated as ``torch.optim.Muon`` does it; a 3-D weight (experts, in, out) as its experts'
    ``nn.Linear`` weights (out, in) one by one; the rest exactly as ``torch.optim.AdamW``. Parameters whose gradient is
    None are left alone.

    Memory: one buffer per Muon parameter and two per AdamW parameter, in the parameter's dtype, and temporaries for
    about 2**25 elements at a time. On CPUs without bfloat16 units choose ``newton_schulz_dtype="float32"``: bfloat16
    products are some 30 times slower there.

    Args:
        params: ``module.named_parameters()``, or groups ``{"params": ..., "algorithm": "muon" | "adamw"}`` of tensors
            with or without names. Unnamed tensors alone do only if none of them is a matrix.
        lr: step size of Muon; with ``match_rms_adamw`` it is on AdamW's scale.
        adamw_lr: step size of AdamW; None: ``lr``.
        momentum: decay of Muon's gradient average, in [0, 1).
        nesterov: look one momentum step ahead.
        weight_decay: decoupled decay per step in units of the learning rate, for both algorithms.
        adamw_weight_decay: the same for AdamW alone; None: ``weight_decay``.
        adamw_betas: decay of AdamW's averages of the gradient and of its square.
        adamw_eps: added to AdamW's denominator.
        newton_schulz_steps: iterations per matrix.
        coefficients: of the quintic iteration.
        adjust_lr: "match_rms_adamw": lr * 0.2 * sqrt(max(fan_out, fan_in)); "original": lr * sqrt(max(1, fan_out /
            fan_in)). The meanings of ``adjust_lr_fn`` in ``torch.optim.Muon``.
        newton_schulz_dtype: "bfloat16" (as torch), "float32" or "float64", or the torch dtype.
        adamw_names: regular expression searched in parameter names; matching parameters go to AdamW.
        batched: join equal shapes into one product. None: on GPUs, unless deterministic algorithms are asked for
            (``torch.use_deterministic_algorithms``), where a matrix's bits could depend on its neighbours.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        newton_schulz_steps: int = 5,
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        newton_schulz_dtype: str | torch.dtype = "bfloat16",
        adamw_names: str = DEFAULT_ADAMW_NAMES,
        batched: bool | None = None,
    ) -> None:
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "newton_schulz_steps": newton_schulz_steps,
            "coefficients": coefficients,
            "adjust_lr": adjust_lr,
            "newton_schulz_dtype": newton_schulz_dtype,
            "batched": batched,
        }
        adamw = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            "betas": adamw_betas,
            "eps": adamw_eps,
        }
        groups = _build_groups(params, adamw_names, {"muon": muon, "adamw": adamw})
        # Only what both groups have belongs into the defaults: torch copies them into every group.
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._adopt_adamw()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient; return what ``closure`` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon_step(self.param_groups[0], self.state)
        if self._adamw is not None:
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups beyond the two."""
        if len(self.param_groups) == 2:
            raise ValueError(
                "MuonAdamW keeps exactly two parameter groups: give it all parameters when it is made; those that are "
                "to be trained later are skipped as long as they have requires_grad=False"
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading a state dict, copying and unpickling all come through here, with new group dicts.
        super().__setstate__(state)
        self._adopt_adamw()

    def _adopt_adamw(self) -> None:
        # torch's own AdamW steps the second group: it works on the very group dict and on the same state, so it has
        # nothing of its own to keep in step.
        group = self.param_groups[1]
        adamw = torch.optim.AdamW([group] if group["params"] else [torch.zeros(())])
        for key, value in adamw.defaults.items():
            group.setdefault(key, value)  # an empty group looks like those of other stages
        self._adamw = adamw if group["params"] else None


def _build_groups(params: ParamsT, adamw_names: str, hyper: dict[Algorithm, dict[str, Any]]) -> list[dict[str, Any]]:
    problems: list[str] = []
    try:
        pattern = re.compile(adamw_names)
    except re.error as error:
        problems.append(f"adamw_names is not a regular expression: {error}")
        pattern = re.compile(DEFAULT_ADAMW_NAMES)
    split = split_parameters(params, pattern, problems)
    groups = [_build_group(algorithm, split, hyper[algorithm], problems) for algorithm in hyper]
    if problems:
        raise ValueError("MuonAdamW cannot be set up:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return groups


def _build_group(algorithm: Algorithm, split: Split, hyper: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    options = split.options[algorithm]
    unknown = sorted(options.keys() - hyper.keys())
    if unknown:
        problems.append(f"a group with algorithm={algorithm!r} cannot set {unknown}; it can set {sorted(hyper)}")
    hyper = {**hyper, **options}
    if "newton_schulz_dtype" in hyper:  # kept as a string: readable in checkpoints and logs
        hyper["newton_schulz_dtype"] = str(hyper["newton_schulz_dtype"]).removeprefix("torch.")
    problems += [f"{key} ({algorithm}) {mend}, got {hyper[key]!r}" for key, mend in _invalid(hyper).items()]
    return {**split.param_group(algorithm), "name": algorithm, "algorithm": algorithm, **hyper}


def _invalid(hyper: dict[str, Any]) -> dict[str, str]:
    """Return the hyper-parameters that cannot be used, each with what it must be."""
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "lr": (lambda x: x >= 0, "must be at least 0"),
        "weight_decay": (lambda x: x >= 0, "must be at least 0"),
        "momentum": (lambda x: 0 <= x < 1, "must be in [0, 1)"),
        "newton_schulz_steps": (lambda x: 1 <= x < 100, "must be between 1 and 99"),
        "coefficients": (lambda x: len(x) == 3, "must be three numbers"),
        "adjust_lr": (lambda x: x in _LR_ADJUSTMENTS, f"must be one of {', '.join(_LR_ADJUSTMENTS)}"),
        "newton_schulz_dtype": (lambda x: x in _DTYPES, f"must be one of {', '.join(_DTYPES)}"),
        "betas": (lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x), "must be two numbers in [0, 1)"),
        "eps": (lambda x: x >= 0, "must be at least 0"),
    }
    return {key: mend for key, (valid, mend) in rules.items() if key in hyper and not valid(hyper[key])}
