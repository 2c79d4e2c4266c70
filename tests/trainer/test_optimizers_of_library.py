"""Every optimizer of ``pytorch_optimizer`` that takes plain parameters, on two stages, against a plain Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer

from tests.helpers.oracle import joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit

# They want more than plain parameters, a learning rate and one gradient: the model, the loss, second derivatives.
OTHERWISE = {
    "a2grad", "adago", "adahessian", "adalomo", "adammini", "adamuon", "alig", "bsam", "demo",
    "distributedmuon", "emofact", "emolynx", "emonavi", "lbfgs", "lomo", "lorarite", "muon", "muonclip",
    "normuon", "ranger21", "sophiah", "spectralsphere",
}  # fmt: skip
# They compute over all parameters, draw random numbers, or amplify rounding (through eigenvectors, signs or divisions).
TO_NO_BITS = {
    "adagc", "adai", "adams", "alice", "asgd", "avagrad", "conda", "dadaptadagrad", "dadaptadam", "dadaptadan",
    "dadaptlion", "dadaptsgd", "dash", "gravity", "kate", "kron", "magma", "prodigy", "scalableshampoo",
    "shampoo", "soap", "splus", "trac",
}  # fmt: skip
NAMES = sorted(set(pytorch_optimizer.get_supported_optimizers()) - OTHERWISE)


class Supported(Net):
    def configure_optimizers(self) -> Any:
        return pytorch_optimizer.load_optimizer(self.run.optimizer)(self.parameters(), lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_trains_on_two_stages(pools: Pools, name: str) -> None:
    run = Run(Supported, "sync", {"microbatches": 2}, optimizer=name)
    weights = joined_weights(pools.run(2, fit, run), 2)
    if name in TO_NO_BITS:
        assert all(np.isfinite(value).all() for value in weights.values())
        return
    for key, value in fit(replace(run, strategy="plain", options={}))["weights"].items():
        np.testing.assert_allclose(weights[key], value, rtol=0, atol=1e-5, err_msg=key)
