"""Optimizers and corrections for training with delayed gradients: plain torch optimizers, usable anywhere."""

from lightning_asyncpp.optim.adan import Adan
from lightning_asyncpp.optim.delay_compensation import DelayCompensation
from lightning_asyncpp.optim.error_feedback import ErrorFeedback
from lightning_asyncpp.optim.gradient_extrapolation import GradientExtrapolation
from lightning_asyncpp.optim.learning_rate_discount import LearningRateDiscount
from lightning_asyncpp.optim.lion import Lion
from lightning_asyncpp.optim.mars import MARS
from lightning_asyncpp.optim.muon_adamw import MuonAdamW
from lightning_asyncpp.optim.nesterov_look_ahead import NesterovLookAhead
from lightning_asyncpp.optim.normuon_adamw import NorMuonAdamW
from lightning_asyncpp.optim.soap import SOAP
from lightning_asyncpp.optim.weight_prediction import WeightPrediction

__all__ = [
    "MARS",
    "SOAP",
    "Adan",
    "DelayCompensation",
    "ErrorFeedback",
    "GradientExtrapolation",
    "LearningRateDiscount",
    "Lion",
    "MuonAdamW",
    "NesterovLookAhead",
    "NorMuonAdamW",
    "WeightPrediction",
]
