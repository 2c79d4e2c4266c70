"""YAML as `asyncpp fit` reads it, with repeated keys refused."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_asyncpp.lightning_cli.yaml_limits import VALUE_ERRORS, check_yaml

_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9_]+(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)


def _like_the_parser(cls: Any) -> Any:
    """Resolve plain values as jsonargparse does: 1e-3 is a number (YAML 1.1: a text), a date is a text."""
    left_out = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
    cls.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in left_out]
        for first, resolvers in cls.yaml_implicit_resolvers.items()
    }
    cls.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return cls


@_like_the_parser
class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key {key!r} appears twice; rename one")
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


@_like_the_parser
class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def read_yaml(path: Path) -> Any:
    """Read a file.

    Raises:
        ValueError: it cannot be read, is no YAML, or repeats a key; the message names the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        return yaml.load(text, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} cannot be read: {reason}") from error
    except (yaml.YAMLError, *VALUE_ERRORS) as error:  # TypeError also for a key that cannot be one, such as a list
        raise ValueError(f"{path} is no YAML that can be used: {error}") from error


def write_yaml(path: Path, content: Any) -> None:
    """Write plain values so that :func:`read_yaml` and ``asyncpp fit`` read the same ones."""
    path.write_text(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True), encoding="utf-8")
