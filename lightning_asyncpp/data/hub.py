"""The Hugging Face Hub: what is fetched from it, and what is said when it does not answer.

Errors of the hub's client name a URL and an HTTP library. Here they become a :class:`DataError` with the mend: most
machines without internet are clusters, to which files are copied by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.optional_packages import optional_package

HUB = "hf://"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # "gpt2", "HuggingFaceTB/SmolLM-360M"
_SECONDS = 10.0
_TOO_MANY_REQUESTS = 429


class HubError(DataError):
    """The hub cannot be reached, breaks off, or asks for patience: what failed may succeed later."""


def hub_package() -> Any:
    """Return the module ``huggingface_hub``.

    Raises:
        ImportError: it is not installed; the message says how.
    """
    return optional_package("huggingface_hub", "reading from the Hugging Face Hub")


def hub_endpoint() -> str:
    """Return the address of the hub: ``HF_ENDPOINT``, or its own."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def is_hub_name(name: str) -> bool:
    """Whether ``name`` reads like a repository of the hub, and like no file of this machine."""
    return _NAME.fullmatch(name) is not None and not name.endswith(".json") and not Path(name).exists()


def fetch_tokenizer(name: str) -> Path:
    """Return the path of ``tokenizer.json`` of a repository of models, from the hub's cache where it is there already.

    Raises:
        DataError: the hub cannot be reached, or has no such file.
    """
    package = hub_package()
    offline = (
        f"without internet, run `hf download {name} tokenizer.json --local-dir DIR` on a machine that has it, copy the "
        "file here, and give its path as the tokenizer"
    )
    with hub_errors(f"tokenizer={name!r}, which is no file here", offline):
        with suppress(package.errors.LocalEntryNotFoundError):
            return Path(package.hf_hub_download(name, "tokenizer.json", local_files_only=True))
        # Asked for first: it fails at once where the download would try for half a minute.
        package.HfApi(hub_endpoint()).model_info(name, timeout=_SECONDS)
        return Path(package.hf_hub_download(name, "tokenizer.json", endpoint=hub_endpoint()))


@contextmanager
def hub_errors(what: str, offline: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into a :class:`DataError`.

    Args:
        what: what was asked for, as the user gave it.
        offline: what to do where there is no internet.

    Raises:
        HubError: it may pass.
        DataError: the hub does not have what was asked for, or keeps it from this user.
    """
    try:
        yield
    except (DataError, ImportError):
        raise
    except Exception as error:  # the client's HTTP library, and with it its exceptions, changed twice already
        raise _told(what, error, offline) from error


def _told(what: str, error: Exception, offline: str) -> DataError:
    errors = hub_package().errors
    reason = (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
    )
    if isinstance(error, errors.HFValidationError):
        return DataError(f"{what}: is no name that the hub could have ({reason}); correct it")
    if isinstance(error, errors.GatedRepoError):
        return DataError(
            f"{what}: access has to be asked for on its page of the hub, and HF_TOKEN to be set ({reason})"
        )
    unknown = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    missing = isinstance(error, (*unknown, FileNotFoundError)) and not isinstance(error, errors.LocalEntryNotFoundError)
    if missing:
        return DataError(
            f"{what}: the hub has no such repository, revision or file ({reason}); "
            "correct the name, or set HF_TOKEN if it is private"
        )
    if getattr(getattr(error, "response", None), "status_code", None) == _TOO_MANY_REQUESTS:
        return HubError(
            f"{what}: the Hugging Face Hub ({hub_endpoint()}) was asked too often ({reason}); run the same command "
            "again in some minutes, or set HF_TOKEN: whom it knows may ask more"
        )
    return HubError(f"{what}: the Hugging Face Hub ({hub_endpoint()}) cannot be reached ({reason}); {offline}")
