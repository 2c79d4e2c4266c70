"""After ``fit`` every way to the trained model, in the main process, leads to all of it, or says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.trainer.launching.after_fit import WHOLE

ROOT = Path(__file__).parents[3]
STAGE = ("ConfigurationError: state_dict() of Net", "trainer.strategy.full_state_dict()", "epoch=0-step=2.ckpt")
LAYER = ("RuntimeError: layer '0' lives on pipeline stage 0", "strategy.full_state_dict()")
# Where not everything is whole: what is said instead. The ranks of popen are the processes of the script, each with its
# stage; those that are forked or spawned are gone, and so are optimizer and progress.
TABLE: dict[tuple[str, int], dict[str, tuple[str, ...]]] = {
    ("popen", 1): {},
    ("popen", 2): {
        **dict.fromkeys(
            ("module.state_dict()", "torch.save(module.state_dict())", "module.model.state_dict()",
             "deepcopy(module).state_dict()", "module.state_dict(), once more"), STAGE,
        ),
        **dict.fromkeys(("module(x)", "module.model(x)"), LAYER),
    },
    **{
        (method, devices): {
            "trainer.save_checkpoint(path)": (
                f"ConfigurationError: start_method='{method}'",
                "epoch=0-step=2.ckpt",
                "torch.save(module.state_dict(), path)",
            )
        }
        for method in ("fork", "spawn") for devices in (1, 2)
    },
}  # fmt: skip
ACTIONS = ("validate", "test", "predict")
CASES = [
    pytest.param(method, devices, marks=[] if (method, devices) in (("popen", 2), ("fork", 2)) else pytest.mark.slow)
    for method, devices in TABLE
]


@pytest.mark.parametrize(("method", "devices"), CASES)
def test_every_way_leads_to_the_whole_model_or_says_where_it_is(method: str, devices: int, tmp_path: Path) -> None:
    then = ",".join(ACTIONS)
    arguments = ("-m", "tests.trainer.launching.after_fit", method, str(devices), then, str(tmp_path))
    done = forked.run(arguments, tmp_path, seconds=150, PYTHONPATH=str(ROOT))
    rows = [line[1:].split("\t", 2) for line in done.stdout.splitlines() if line.startswith("@")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert {action for action, _, _ in rows} == {"fit", *ACTIONS}
    for action, name, said in rows:
        expected = TABLE[method, devices].get(name, (WHOLE,))
        assert all(part in said for part in expected), f"{method}, {devices}, after {action}: {name}: {said}"
