"""Against pytorch_optimizer, an independent implementation: equal where it follows the papers, and where it does not.

In a process of its own: its import registers classes named SOAP and Muon, and then those short names
are ambiguous on the command line.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

COMPARE = """
import pytorch_optimizer as library
import torch
from torch import nn
from lightning_asyncpp import optim as ours

torch.set_num_threads(1)
DOUBLE = torch.float64

def run(make, shape, start):
    p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE))
    optimizer = make([("up.weight", p)] if start == "named" else [p])
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        p.grad = torch.randn(shape, generator=generator, dtype=DOUBLE)
        optimizer.step()
    return p.detach()

def compare(name, mine, theirs, shape=(5, 7), start="plain", tolerance=1e-12):
    difference = (run(mine, shape, start) - run(theirs, shape, "plain")).abs().max().item()
    print(name, difference)
    assert difference < tolerance, name

decayed = {"lr": 0.01, "weight_decay": 0.1}
# Without weight decay: the library decays after the step. With eps of 0: there it is not bias corrected.
for frequency, tolerance in ((100, 1e-12), (3, 1e-6)):  # the library's QR is fp32, whatever the weights
    soap = {"lr": 0.01, "eps": 0, "weight_decay": 0, "precondition_frequency": frequency}
    compare("SOAP", lambda p: ours.SOAP(p, **soap), lambda p: library.SOAP(p, **soap), tolerance=tolerance)
# Newton-Schulz in bfloat16 in both, but not the same products.
compare(
    "NorMuon",
    lambda p: ours.NorMuonAdamW(p, **decayed),
    lambda p: library.NorMuon([{"params": p, "use_muon": True}], update_scale="match_rms", **decayed),
    start="named",
    tolerance=2e-4,
)
"""

LATE = """
import pytorch_optimizer as library
import torch
from torch import nn
from lightning_asyncpp import optim as ours

torch.set_num_threads(1)

def run(make, late):
    # The weights of a parameter whose gradients begin with the sixth update, and after how many of them.
    p, q = (nn.Parameter(torch.ones(5, 7)) for _ in range(2))
    optimizer = make([p, q])
    generator = torch.Generator().manual_seed(1)
    for step in range(5 * late + 20):
        q.grad = torch.ones(5, 7)
        p.grad = torch.randn(5, 7, generator=generator) if step >= 5 * late else None
        optimizer.step()
    return p.detach()

for name, late_equals_early in (("SOAP", False),):
    for package, equal in ((ours, True), (library, late_equals_early)):
        make = lambda p: getattr(package, name)(p, lr=0.01)
        difference = (run(make, False) - run(make, True)).abs().max().item()
        print(package.__name__, name, difference)
        assert (difference < 1e-6) == equal, (package.__name__, name)
"""

SHORT_NAMES = """
import jsonargparse
import torch
import lightning_asyncpp.optim

parser = jsonargparse.ArgumentParser(exit_on_error=False)
parser.add_subclass_arguments(torch.optim.Optimizer, "optimizer", skip={"params"}, instantiate=False)
for name in ("SOAP",):
    assert parser.parse_args([f"--optimizer={name}"]).optimizer.class_path == f"lightning_asyncpp.optim.{name}"
import pytorch_optimizer
for name in ("SOAP",):
    try:
        parser.parse_args([f"--optimizer={name}"])
    except jsonargparse.ArgumentError as error:
        assert "pytorch_optimizer" in str(error), error
    else:
        raise AssertionError(name)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(COMPARE, id="updates are equal"),
        pytest.param(LATE, id="a late first gradient is like an early one in ours"),
        pytest.param(SHORT_NAMES, id="its import takes short names away"),
    ],
)
def test_the_package_against_an_independent_implementation(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
