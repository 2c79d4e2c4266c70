"""Delayed gradients without a pipeline: what the Trainer's and Fabric's ``delayed_gradient`` strategies share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.batch_output import NanLosses, no_weight_text
from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.cut.ties import find_ties, first_sharing
from lightning_asyncpp.core.cut.units import pipeline_units, stages_of_parameters
from lightning_asyncpp.core.emulator.delayed_weights import DelayedWeights, check_same_delay
from lightning_asyncpp.core.emulator.gradient_delay import DelaySettings
from lightning_asyncpp.core.emulator.micro_batch_gradient import MicroBatchGradient
from lightning_asyncpp.core.emulator.mini_batch_counts import MiniBatchCounts
from lightning_asyncpp.core.schedule import StalenessRule
from lightning_asyncpp.core.updates.clipping import clip_coefficient
from lightning_asyncpp.core.updates.reduction import squares
from lightning_asyncpp.core.weights import leave_out, lent
from lightning_asyncpp.errors import ConfigurationError, NonFiniteGradientError


class DelayEmulator:
    """Trains by the rule W_{t+1} = W_t - U(g_t), with g_t taken at W_{max(t - d, 0)}, in one process.

    With a synchronous start of N mini-batches: at W_t for t < N, then at W_{max(t - d, N)}.

    ``with emulator.weights.stale():`` run forward and backward; then :meth:`update`.

    Args:
        settings: the user's choices; checked.
        module: whose parameters are trained.
        optimizer: over them; it is told the delay if it wants to know.
        micro_batches: sums the gradients as a pipeline does; None leaves them as the backward left them.
        state: of a checkpoint to go on from; the optimizer's may have been loaded before.
        partition: how a pipeline cuts the model that ``micro_batches`` calls; None where delays do not go by that.

    Attributes:
        weights: the weight versions.
        counts: what layers counted since the last update.
        mini_batch: index t of the next update.
    """

    def __init__(
        self,
        settings: DelaySettings,
        module: nn.Module,
        optimizer: Optimizer,
        micro_batches: MicroBatchGradient | None = None,
        state: Mapping[str, Any] | None = None,
        partition: Partition | None = None,
    ) -> None:
        _check_parameters(module)
        self.settings, self.optimizer, self.micro_batches = settings, optimizer, micro_batches
        self.mini_batch = 0
        self._last_norm: float | None = None
        self._updating = False
        self._nan_losses = NanLosses()
        self._has_warned = False  # of a mini-batch without weight
        self.counts = MiniBatchCounts(module)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self.weights = self._versions(partition)
        self.names |= self.counts.buffer_names
        # Of the parameters with the largest delay: with all others it begins at the same time.
        self._rule = StalenessRule(max(self.weights.delays.values(), default=0), settings.start)
        if micro_batches is not None:
            micro_batches.go_to = self._go_to
        self._told: Any = None
        self._track()
        if state is None:
            self._tell_delay()
        else:
            self.load_state_dict(state)

    def update(self, step: Callable[[], Any], check_finite: bool = True) -> bool:
        """Apply the update of a complete gradient, which the parameters' ``grad`` holds.

        Args:
            step: clips the gradient and steps the optimizer.
            check_finite: False where the precision plugin scales the loss and leaves such updates out itself.

        Returns:
            Whether the gradient was finite; if not, weights and optimizer were left alone.

        Raises:
            NonFiniteGradientError: under the policy ``"stop"``, before anything was changed.
        """
        self._check_unwritten()
        self._track()
        micro_batches = self.micro_batches if self.micro_batches is not None and self.micro_batches.pending else None
        if micro_batches is not None:
            micro_batches.complete()
        finite = not check_finite or self._is_finite(micro_batches)
        if not finite and self.settings.nonfinite_gradients == "stop":
            raise NonFiniteGradientError(self._non_finite())
        self._updating = True
        self._tell_delay()
        try:
            before = {} if self._rule.in_start(self.mini_batch) else self.weights.advance()
            if finite and (micro_batches is None or micro_batches.weight):
                with lent(self.optimizer, {p: w for p, w in before.items() if isinstance(p, nn.Parameter)}):
                    step()
                self._update_from_counts()
            else:
                leave_out(self.optimizer)
        finally:
            self._updating = False
        if micro_batches is not None:
            if micro_batches.weight:
                self._last_norm = micro_batches.norm()
            elif not self._has_warned:
                self._has_warned = True
                warnings.warn(no_weight_text(self.mini_batch), stacklevel=2)
            self._nan_losses.updated(self.mini_batch, micro_batches.nan_places, finite)
            micro_batches.clear()
        self.counts.clear()
        self.mini_batch += 1
        return finite

    @property
    def updating(self) -> bool:
        """Whether an update is being applied."""
        return self._updating

    def check_no_update(self) -> None:
        """Refuse what saves, loads or evaluates while an update is applied, as a pipeline must.

        Raises:
            RuntimeError: one is applied.
        """
        if self._updating:
            raise RuntimeError("a checkpoint cannot be taken or loaded while an update is applied")

    def drop(self) -> None:
        """Throw away what batches have brought since the last update: they belong to none."""
        self.counts.clear()
        if self.micro_batches is not None:
            self.micro_batches.drop()

    def check_finite(self) -> None:
        """Raise NonFiniteGradientError if the gradient that the parameters hold is not finite."""
        if not self._is_finite(None):
            raise NonFiniteGradientError(self._non_finite())

    def clip(self, max_norm: float) -> Tensor:
        """Clip a gradient that was summed over micro-batches, as a pipeline clips it; returns the norm before."""
        assert self.micro_batches is not None
        self.micro_batches.complete()
        norm = self.micro_batches.norm()
        agreed = clip_coefficient(norm, max_norm)
        steps_ahead = self.settings.steps_ahead and not self._rule.in_start(self.mini_batch)
        ahead = clip_coefficient(self._norm_known_ahead(norm), max_norm) if steps_ahead else agreed
        for parameter in self.names:
            is_ahead = self.settings.delay == "least" or self.weights.delays[parameter] == 0
            factor = ahead if is_ahead else agreed
            if parameter.grad is not None and factor < 1.0:
                parameter.grad.mul_(factor)
        return torch.tensor(norm)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beyond weights and optimizer: the older weights and the counters.

        Raises:
            RuntimeError: an update is being applied, and the weights that its gradient was taken at are gone.
        """
        self.check_no_update()
        state: dict[str, Any] = {
            **self._same_on_resume(),
            "mini_batch": self.mini_batch,
            "older_weights": self.weights.state_dict(self.names),
        }
        if self.micro_batches is not None:
            state["micro_batch"], state["seed"] = self.micro_batches.next_micro_batch, self.micro_batches.seed
            state["norm"] = self._last_norm
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on where a checkpoint ended; weights were loaded before. Without a state all versions are the weights.

        Raises:
            ConfigurationError: it was written under another delay.
        """
        if state is None:
            self.weights.load_state_dict({}, self.names)
            return
        check_same_delay(state, self._same_on_resume())
        self.weights.load_state_dict(state["older_weights"], self.names)
        self.mini_batch = int(state["mini_batch"])
        self._tell_delay()
        if self.micro_batches is not None:
            self.micro_batches.next_micro_batch = int(state["micro_batch"])
            self.micro_batches.seed = int(state["seed"])
            self._last_norm = state["norm"]

    def _update_from_counts(self) -> None:
        if self.micro_batches is not None:
            for layer, counts in self.micro_batches.counted.take_statistics().items():
                self.counts.counted.add(layer, counts)
        self.counts.update()

    def _norm_known_ahead(self, exact: float) -> float:
        """What stages are clipped by that step ahead: the norm of the mini-batch before, if nothing else is chosen."""
        chosen = self.settings.last_stage_norm
        if chosen == "exact":
            return exact
        if chosen != "own":
            return self._last_norm or 0.0
        assert self.micro_batches is not None
        return self.micro_batches.norm({name for p, name in self.names.items() if self.weights.delays[p] == 0})

    def _same_on_resume(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "delay": settings.delay, "stages": settings.stages, "micro_batches": settings.micro_batches,
            "slack": settings.slack, "lookahead": settings.lookahead,
            "synchronous_start": settings.synchronous_start,
            "delays": {name: self.weights.delays[p] for p, name in self.names.items()},
        }  # fmt: skip

    def _versions(self, partition: Partition | None) -> DelayedWeights:
        """Versions of all parameters, and of the buffers of layers, which go with their parameters."""
        settings, names = self.settings, list(self.names.values())
        stages = self._pipeline_stages(partition)
        delays = dict(zip(self.names, settings.of_parameters(names, stages)))
        buffers, held = self.counts.buffers_with(delays), dict[Tensor, int]()
        if settings.delay == "least":
            held = dict(zip(self.names, settings.held(names, stages)))
            held |= self.counts.buffers_with(held)
        return DelayedWeights({p: d for p, d in delays.items() if isinstance(p, nn.Parameter)}, buffers, held)

    def _go_to(self, place: int) -> None:
        if not self._rule.in_start(self.mini_batch):
            self.weights.go_to(place)

    def _pipeline_stages(self, partition: Partition | None) -> dict[str, int] | None:
        """Stages of the parameters as a pipeline cuts the model, where it does.

        Of a stage that shares a parameter with one before, with the least staleness, that one: it has the gradient of
        that parameter last.
        """
        model = None if self.micro_batches is None else self.micro_batches.model
        if partition is None or model is None:
            return None
        names = {id(p): name for p, name in self.names.items()}
        parameters = dict(model.named_parameters(remove_duplicate=False))  # by all names, those of layers among them
        stages = stages_of_parameters(model, partition.counts)
        ties = find_ties(pipeline_units(model), partition.counts) if self.settings.delay == "least" else []
        first = {stage: first_sharing(stage, ties) for stage in range(len(partition.counts))}
        last = {stage: stage if shared is None else shared for stage, shared in first.items()}
        found: dict[str, int] = {}
        for name, stage in stages.items():
            if name in parameters:
                found.setdefault(names[id(parameters[name])], last[stage])
        return found

    def _track(self) -> None:
        # Anew at every update: a callback may have added a group of parameters that were frozen until now.
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        unknown = [p for p in held if p not in self.weights.delays]
        if unknown:
            raise ConfigurationError(
                f"the optimizer holds {len(unknown)} tensor(s), the first of shape {tuple(unknown[0].shape)}, that are"
                " no parameters of the module: make it from self.parameters() or self.named_parameters()"
            )
        self.weights.track(p for p in held if p.requires_grad)

    def _check_unwritten(self) -> None:
        if written := sorted(self.names[p] for p in self.weights.take_written()):
            raise ConfigurationError(
                f"{', '.join(written[:5])}: changed in place between the forward and the update, while they held older"
                " weights, so the change would be lost; change weights in on_train_batch_start or on_train_batch_end"
            )

    def _tell_delay(self) -> None:
        if not callable(set_delay := getattr(self.optimizer, "set_delay", None)):
            return
        delay = 0 if self._rule.in_start(self.mini_batch) else self.settings.delay
        told = delay if isinstance(delay, int) else self._staleness()
        if told != self._told:
            set_delay(told)
        self._told = told

    def _staleness(self) -> dict[Tensor, float]:
        """How many updates old the gradient of each parameter in the open mini-batch is."""
        micro_batches, delays = self.micro_batches, dict[Tensor, float](self.weights.delays)
        if self.settings.delay != "least" or micro_batches is None:
            return delays
        count = micro_batches.places or micro_batches.count
        rules = {p: StalenessRule(1, held=held) for p, held in self.weights.held.items()}
        return {p: rules[p].staleness(count) for p in delays}

    def _is_finite(self, micro_batches: MicroBatchGradient | None) -> bool:
        return micro_batches.finite if micro_batches is not None else math.isfinite(sum(squares(self._gradients())))

    def _gradients(self) -> dict[str, Tensor]:
        gradients = {name: p.grad for p, name in self.names.items() if p.grad is not None}
        dense = {name: g.coalesce().values() if g.is_sparse else g for name, g in gradients.items()}
        return {name: torch.view_as_real(g) if g.is_complex() else g for name, g in dense.items()}

    def _non_finite(self) -> str:
        bad = [name for name, gradient in self._gradients().items() if not bool(torch.isfinite(gradient).all())]
        return (
            f"the gradient of mini-batch {self.mini_batch} holds NaN or Inf (in {', '.join(bad[:5])}); the weights are"
            " those before its update. Lower the learning rate, clip gradients, or set nonfinite_gradients='skip'"
            + (" with delay='least' and slack='exact', or with delay=1" if self.settings.steps_ahead else "")
        )


def _check_parameters(module: nn.Module) -> None:
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ConfigurationError(
            f"parameters have no shape yet ({', '.join(lazy[:5])}): older versions of them cannot be kept; run one"
            " forward before training (a lazy layer gets its shape there)"
        )
