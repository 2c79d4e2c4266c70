"""A pipeline from set-up to the end, as both the Trainer's and Fabric's strategies use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.agreement import exchange
from lightning_asyncpp.pipeline.engine import Engine
from lightning_asyncpp.pipeline.errors import (
    ConfigurationError,
    PeerLostError,
    ProtocolError,
    different_calls,
    lost_peers,
)
from lightning_asyncpp.pipeline.failing_session import FailingSession
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.mini_batch import Update
from lightning_asyncpp.pipeline.partition import Partition
from lightning_asyncpp.pipeline.partition_choice import choose_partition
from lightning_asyncpp.pipeline.settings import PipelineSettings, ResolvedSettings
from lightning_asyncpp.pipeline.stage import Stage, cut
from lightning_asyncpp.pipeline.ticket import TicketOffice
from lightning_asyncpp.pipeline.tied_state import tied_group_problems
from lightning_asyncpp.pipeline.update import clip_coefficient
from lightning_asyncpp.pipeline.user_hooks import UserHooks
from lightning_asyncpp.pipeline.weights import leave_out, lent, writing
from lightning_asyncpp.pipeline.whole_model import WholeModel

ApplyStep = Callable[[], None]
_FINISHED = "finished"


def check_norm_type(norm_type: float) -> None:
    """Refuse norms other than the 2-norm: the control message carries a sum of squares.

    Raises:
        ConfigurationError: it is another one.
    """
    if norm_type != 2.0:
        raise ConfigurationError(
            f"norm_type={norm_type}: over pipeline stages gradients are clipped by their 2-norm only; leave it out"
        )


class PipelineSession(FailingSession):
    """Everything that a strategy holds about its pipeline.

    Args:
        settings: the user's choices.
        timeout: of blocking communication; default: torch's.
    """

    def __init__(self, settings: PipelineSettings, timeout: timedelta | None = None) -> None:
        super().__init__(settings.heartbeat)
        self.settings, self.timeout = settings, timeout
        self.resolved: ResolvedSettings | None = None
        self.partition: Partition | None = None
        self.stage: Stage | None = None
        self.optimizer: Optimizer | None = None
        self.seed = 0
        self._office: TicketOffice | None = None
        self._update: Update | None = None
        self._in_step = False

    def connect(self, rank: int, world_size: int) -> Mesh:
        """Fit the settings to the world and make the process groups; a collective call.

        Raises:
            ConfigurationError: the settings do not fit; every rank finds the same.
        """
        resolved = self.settings.resolved(world_size)
        if self.mesh is None or self.mesh.rank != rank or self.mesh.world_size != world_size:
            self.resolved = resolved
            self.mesh = Mesh(resolved.num_stages, resolved.data_parallel_size, rank, placement=resolved.placement)
            self.mesh.connect(self.timeout)
        self.guard.begin(self.mesh)
        return self.mesh

    def cut(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device,
        root: nn.Module | None = None,
        partition: Partition | None = None,
    ) -> Stage:
        """Reduce ``model`` to this rank's stage, once; its meta tensors are materialised on ``device``.

        Without a partition all stages get the same number of layers.
        """
        mesh = self._connected()
        if self.stage is None or self.stage.model is not model:
            partition = partition or choose_partition(model, mesh.stage, mesh.num_stages, "uniform")
            self.stage = cut(model, mesh.stage, mesh.num_stages, seed, device, root, partition.counts)
            self.partition = partition
            self._check_fresh(self.stage)
        self.seed = seed
        return self.stage

    def start(self, hooks: UserHooks, device: torch.device, training: bool) -> Engine:
        """Make the engine; replicas start from replica 0's weights. A collective call.

        Args:
            hooks: the user's side.
            device: where the stage lives.
            training: whether weights will be updated; evaluation needs no second version.
        """
        mesh, stage = self._connected(), self.stage
        assert stage is not None, "cut() comes before start()"
        self.guard.begin(mesh)
        stage.refresh()
        self._copy_from_first_replica(stage)
        settings = self.settings if training else self.settings.with_delay(0)
        self.failure, self.optimizer, self._office = None, None, None
        timeout = None if self.timeout is None else self.timeout.total_seconds()
        resolved = settings.resolved(mesh.world_size)
        self.engine = Engine(stage, mesh, resolved, self.seed, device, hooks, timeout)
        return self.engine

    def describe(self) -> str:
        """What was chosen, in one line."""
        engine = self.running()
        mesh, settings, transport = engine.mesh, engine.settings, engine.runner.transport
        ahead = f", lookahead {settings.lookahead}" if settings.delay else ""
        after = f" after {settings.synchronous_start} synchronous mini-batches" if settings.synchronous_start else ""
        route = "" if transport is None else f"; tensors travel {transport.route}"
        layers = "" if self.partition is None or mesh.num_stages == 1 else f"; {self.partition.describe()}"
        return (
            f"{mesh.num_stages} stages x {mesh.num_replicas} replica(s){mesh.describe_placement()},"
            f" {settings.micro_batches} micro-batches{ahead}, delay {settings.delay}{after}{layers}{route}"
        )

    def attach(self, optimizer: Optimizer) -> None:
        """Take the optimizer of this stage's parameters, and tell it the delay if it wants to know; collective.

        Raises:
            ConfigurationError: one gradient per step is not enough for it, or it treats the copies of a shared
                parameter differently.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates the loss several times per step, but a pipeline brings one gradient per step; use an"
                " optimizer whose step() needs no closure"
            )
        stage = self.running().stage
        fresh = stage.num_stages - 1 if self.settings.fresh_last_stage else None
        problems = tied_group_problems(self._connected(), self.whole_model.ties, stage.parameters, optimizer, fresh)
        if problems:
            raise ConfigurationError.from_problems(problems)
        self.optimizer = optimizer
        self._office = TicketOffice(optimizer)
        self.tell_delay()
        self.running().updates.on_left_out = lambda: leave_out(optimizer)

    @property
    def whole_model(self) -> WholeModel:
        """What is known of the model before it was cut."""
        assert self.stage is not None, "cut() comes first"
        return self.stage.whole

    def tell_delay(self) -> None:
        """Tell the optimizer how old gradients are from the next mini-batch's update on, if it wants to know."""
        if callable(set_delay := getattr(self.optimizer, "set_delay", None)):
            set_delay(self.running().delay_of_next_update)

    @contextmanager
    def user_step(self) -> Iterator[None]:
        """A step of the user runs meanwhile: only the last stage runs it to the end."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def check_collective(self, name: str, step: str, elsewhere: str) -> None:
        """Refuse a collective that other ranks would not join: inside a user's step, and after a failure.

        Args:
            name: of the collective.
            step: what the user's step is called.
            elsewhere: where to call it instead.

        Raises:
            RuntimeError: with the failure as its cause, if there was one.
        """
        if self._in_step:
            raise RuntimeError(
                f"{name} was called inside {step}: only the last stage runs it to the end, so the others would never"
                f" join; move it {elsewhere}"
            )
        if self.failure is not None:
            self.running()

    def close(self, payload: Tensor | None = None) -> None:
        """End the mini-batch and file its ticket."""
        assert self._office is not None, "attach() an optimizer before training"
        engine = self.running()
        if engine.mini_batch == engine.settings.synchronous_start > 0:
            self.tell_delay()  # all earlier updates have been applied: they ended with a flush
        engine.close(self._office.file(), payload)

    def apply_due(self, step: ApplyStep) -> list[Update]:
        """Apply the updates whose time has come; ``step`` clips and steps the optimizer."""
        return self.running().apply_due(lambda update: self._apply(update, step))

    def drain(self, step: ApplyStep) -> list[Update]:
        """Finish what is in flight and apply every outstanding update."""
        return self.running().drain(lambda update: self._apply(update, step))

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the update being applied to a norm over all stages of ``max_norm``.

        Returns:
            The norm before clipping.
        """
        check_norm_type(norm_type)
        norm = self.updating().message.norm
        factor = clip_coefficient(norm, max_norm)
        if factor < 1.0:
            # Each on its own: torch._foreach_mul_ would round the factor to bf16 where the gradients are.
            for parameter in self.running().weights.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return torch.tensor(norm)

    def updating(self) -> Update:
        """The update that is being applied.

        Raises:
            RuntimeError: none is; gradients exist only meanwhile.
        """
        if self._update is None:
            raise RuntimeError("gradients can be clipped only while an update is applied")
        return self._update

    def finish(self) -> None:
        """End the run, after every message has arrived; a collective unless the session failed.

        The engine stays until the next :meth:`start`, so that weights and state can be gathered afterwards.
        """
        if self.engine is None:
            return
        try:
            if self.failure is None and self.engine.runner.transport is not None:
                self.engine.runner.transport.settle()
                self.engine.runner.transport.announce_end_of_run()
                self._finish_together()
                self.engine.close_connections()
        except (PeerLostError, ProtocolError) as error:
            self.fail(error)
            raise
        finally:
            self.engine.release()

    def _finish_together(self) -> None:
        """Wait until all ranks finish.

        Raises:
            ProtocolError: a rank is in another call, and would wait for this one.
        """
        said = exchange(self._connected(), _FINISHED)
        if others := [f"rank {rank}" for rank, text in enumerate(said) if text != _FINISHED]:
            raise different_calls(f"the run ends on this rank, and not on {', '.join(others)}")

    def leave(self) -> None:
        """Finish, and let nobody watch over this rank any longer; a collective unless the session failed."""
        try:
            self.finish()
        finally:
            self.guard.end()

    def _apply(self, update: Update, step: ApplyStep) -> None:
        assert self._office is not None
        self._update = update
        try:
            lending = lent(self.optimizer, update.weights_before)
            with self._office.redeemed(update.ticket), lending, writing(self.optimizer, self._compute_weights()):
                step()
        finally:
            self._update = None

    def _check_fresh(self, stage: Stage) -> None:
        fresh = stage.num_stages - 1 if self.settings.fresh_last_stage else None
        if problems := [p for tie in stage.whole.ties if tie.is_trained for p in tie.problems(fresh)]:
            raise ConfigurationError.from_problems(problems)

    def _compute_weights(self) -> dict[nn.Parameter, Tensor] | None:
        return self.running().weights.compute_weights()

    def _copy_from_first_replica(self, stage: Stage) -> None:
        mesh = self._connected()
        group = mesh.groups.data_parallel if mesh.groups is not None else None
        if group is None:
            return
        source = mesh.rank_of(mesh.stage, replica=0)
        for tensor in stage.state_dict().values():
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)  # backends know few dtypes
            with lost_peers():
                dist.broadcast(data, source, group=group)
            with torch.no_grad():
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    def _connected(self) -> Mesh:
        assert self.mesh is not None, "connect() comes first"
        return self.mesh
