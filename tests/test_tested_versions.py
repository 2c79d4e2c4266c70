"""Who uses a release of Lightning or torch that was not tested is told, and can say that he knows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp import DelayedGradientStrategy, SyncPipelineStrategy, private_names
from lightning_asyncpp.fabric import AsyncPipelineStrategy
from lightning_asyncpp.private_names import TESTED, TESTED_WITH, UntestedVersionWarning, untested_versions

NEWEST = {package: f"{newest[0]}.{newest[1]}" for package, (_, newest) in TESTED.items()}
NEWER = {package: f"{newest[0]}.{newest[1] + 1}" for package, (_, newest) in TESTED.items()}


@pytest.mark.parametrize(
    "text", ["{}", "{}.99", "{}.0+cpu", "{}.0a0", "{}.0.dev20260101+cu130", "{}.0a0+git1234567", "{}.1.post2", "v{}.3"]
)
@pytest.mark.parametrize("package", ["lightning", "torch"])
def test_tested_versions_pass_whatever_their_suffix(package: str, text: str) -> None:
    assert untested_versions({package: text.format(NEWEST[package])}) == ""
    newer = text.format(NEWER[package])
    told = f"{package} {newer} is newer than {NEWEST[package]}.x, which this release was tested with"
    assert untested_versions({package: newer}).startswith(told)


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"torch": "2.10.1+cpu"}, ["torch 2.10.1+cpu is older than 2.11.x, which this release was tested with"]),
        ({"torch": "3.0.0"}, [f"torch 3.0.0 is newer than {NEWEST['torch']}.x"]),
        ({"torch": "3"}, [f"torch 3 is newer than {NEWEST['torch']}.x"]),
        ({"lightning": "1.9.5", "torch": "2.0"}, ["lightning 1.9.5 is older than 2.6.x", "torch 2.0 is older than"]),
        ({"torch": "unknown"}, []),
        ({}, []),
    ],
)
def test_what_is_told(installed: dict[str, str], said: list[str]) -> None:
    text = untested_versions(installed)
    assert all(part in text for part in said)
    assert bool(text) == bool(said)


def install(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str]) -> None:
    real = private_names.version
    monkeypatch.setattr(private_names, "version", lambda package: versions.get(package) or real(package))


@pytest.mark.parametrize(
    "make",
    [AsyncPipelineStrategy, SyncPipelineStrategy, DelayedGradientStrategy],
    ids=lambda make: f"{make.__module__}.{make.__name__}",
)
def test_a_strategy_warns_once_when_it_is_made(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        install(monkeypatch, NEWEST)
        make()
        assert not [w for w in caught if w.category is UntestedVersionWarning]
        install(monkeypatch, {"lightning": "2.99.1", "torch": "2.99"})
        make()
    (told,) = [w for w in caught if w.category is UntestedVersionWarning]
    assert str(told.message).startswith("lightning 2.99.1 is newer than 2.6.x")
    assert "; torch 2.99 is newer than" in str(told.message)
    assert told.filename == __file__, "it points at the user's line"


@pytest.mark.parametrize("how", [{"category": UntestedVersionWarning}, {"message": "lightning 2.99"}])
def test_who_makes_errors_of_warnings_can_silence_it(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"lightning": "2.99.1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        with pytest.raises(UntestedVersionWarning):
            AsyncPipelineStrategy()
        warnings.filterwarnings("ignore", **how)
        AsyncPipelineStrategy()


def test_the_oldest_are_the_floors_of_the_package() -> None:
    floors = dict(re.findall(r"^(\w+)==(\d+\.\d+)", Path(__file__).with_name("floors.txt").read_text(), re.MULTILINE))
    assert {package: f"{major}.{minor}" for package, ((major, minor), _) in TESTED.items()} == {
        package: floors[package] for package in TESTED
    }
    assert TESTED_WITH == {"lightning": "2.6", "torch": "2.11 to 2.15", "torchmetrics": "1.5 to 1.9"}
