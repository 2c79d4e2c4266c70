"""Optimizers and corrections for training with delayed gradients: plain torch optimizers for any training loop.

Nothing here imports Lightning or depends on strategies and pipelines.
"""

from lightning_asyncpp.optim.correction import WeightPrediction
from lightning_asyncpp.optim.error_feedback import ErrorFeedback
from lightning_asyncpp.optim.muon import MuonAdamW, NorMuonAdamW
from lightning_asyncpp.optim.soap import SOAP

__all__ = ["SOAP", "ErrorFeedback", "MuonAdamW", "NorMuonAdamW", "WeightPrediction"]
