"""Where progress is due in a Trainer: from the start of a training, or of an evaluation, to its end, hooks included."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_asyncpp.core.session import PipelineSession

TRAINING, EVALUATION = "training", "evaluation"


class WatchedLoops(Strategy):
    """Tells the watch of a session when its loops run; comes before the strategy that it is mixed into.

    Attributes:
        session: the pipeline.
    """

    session: PipelineSession

    @override
    def on_train_start(self) -> None:
        self.session.watch.progress.enter(TRAINING)
        super().on_train_start()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.session.watch.progress.leave_all()

    @override
    def on_validation_start(self) -> None:
        self.session.watch.progress.enter(EVALUATION)
        super().on_validation_start()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.session.watch.progress.leave(EVALUATION)

    @override
    def on_test_start(self) -> None:
        self.session.watch.progress.enter(EVALUATION)
        super().on_test_start()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self.session.watch.progress.leave(EVALUATION)

    @override
    def on_predict_start(self) -> None:
        self.session.watch.progress.enter(EVALUATION)
        super().on_predict_start()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self.session.watch.progress.leave(EVALUATION)
