"""The `safetensors` package, which only those need who exchange models with others."""

from __future__ import annotations

from typing import Any


def safetensors() -> Any:
    """Return the package, with its functions for torch imported.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'files of Hugging Face models need the `safetensors` package: pip install "lightning-asyncpp[hf]"'
        ) from error
    return safetensors
