"""What no number of processes could make right is refused where a strategy is made, all of it at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from lightning_asyncpp import fabric, pytorch
from lightning_asyncpp.pipeline.errors import ConfigurationError

STRATEGIES = [
    getattr(package, name)
    for package in (pytorch, fabric)
    for name in ("AsyncPipelineStrategy", "SyncPipelineStrategy")
]
WRONG: list[tuple[str, Any, str]] = [
    ("micro_batches", 0, "at least 1"),
    ("micro_batches", 2.5, "a whole number"),
    ("partition", [2, 0], "at least 1"),
    ("heartbeat", -1, "above 0, or None"),
    ("timeout", 5, "a datetime.timedelta above 0"),
    ("timeout", timedelta(seconds=-1), "a datetime.timedelta above 0"),
    ("interface", 3, "the name of a network interface"),
    ("interface", "", "the name of a network interface"),
    ("state_dict_type", "shard", "must be 'full' or 'sharded'"),
    ("async_checkpoints", "yes", "True or False"),
    ("fresh_last_stage", 1, "True or False"),
]


def name_of(strategy: type) -> str:
    return f"{strategy.__module__}.{strategy.__name__}"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
@pytest.mark.parametrize(("name", "value", "mend"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG])
def test_a_wrong_argument_is_named_with_its_value_and_the_mend(
    strategy: type, name: str, value: Any, mend: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        strategy(**{name: value})
    assert name in str(caught.value)
    assert repr(value).strip("[]") in str(caught.value)
    assert mend in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
def test_all_are_named_at_once(strategy: type) -> None:
    with pytest.raises(ConfigurationError) as caught:
        strategy(placement="beside", heartbeat=0, timeout=5, state_dict_type="", async_checkpoints=None)
    for name in ("placement='beside'", "heartbeat=0", "timeout=5", "state_dict_type=''", "async_checkpoints=None"):
        assert name in str(caught.value)


def test_whether_an_inexact_resume_is_accepted_is_yes_or_no() -> None:
    with pytest.raises(ConfigurationError, match=r"inexact_resume='no' must be True or False"):
        pytorch.AsyncPipelineStrategy(inexact_resume="no")
