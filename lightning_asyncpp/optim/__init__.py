"""Optimizers and corrections for training with delayed gradients: plain torch optimizers, usable anywhere."""

from lightning_asyncpp.optim.error_feedback import ErrorFeedback
from lightning_asyncpp.optim.muon_adamw import MuonAdamW

__all__ = ["ErrorFeedback", "MuonAdamW"]
