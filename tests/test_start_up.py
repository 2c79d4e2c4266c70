"""What an import brings along: a script that trains its own module waits for nothing that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("litdata", "boto3", "requests", "jsonargparse", "docstring_parser", "matplotlib", "pandas", "transformers")


def loaded(statement: str) -> set[str]:
    """Names of the heavy packages that a new interpreter has loaded after a statement."""
    code = f"import json, sys; {statement}; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", ["lightning_asyncpp", "lightning_asyncpp.fabric", "lightning_asyncpp.data"])
def test_an_import_brings_nothing_heavy_but_what_lightning_does(package: str) -> None:
    assert loaded(f"import {package}") <= loaded("import lightning.pytorch, lightning.fabric")
