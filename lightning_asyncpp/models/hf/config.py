"""A GPT's config as a config.json of `transformers`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.hf.architectures import ARCHITECTURES, Architecture
from lightning_asyncpp.models.saved import TRAINING_ONLY, WeightsError, values_of

_ROPE = ("rope_type", "rope_theta", "partial_rotary_factor")
_FOLLOWING = ("num_key_value_heads", "head_dim")  # where they are missing, they follow from num_attention_heads
_ABSENT = object()


def architecture_of(config: GPTConfig) -> Architecture:
    """The class of `transformers` that a GPT is.

    Raises:
        WeightsError: none is, with what each of them lacks.
    """
    values = values_of(config)
    lacking = {architecture: _lacking(architecture, values) for architecture in ARCHITECTURES}
    for architecture, problems in lacking.items():
        if not problems:
            return architecture
    listed = [f"{a.class_name} {problem}" for a, problems in lacking.items() for problem in problems]
    raise WeightsError.from_problems("no class of transformers computes what this model computes", listed)


def config_json(config: GPTConfig, architecture: Architecture, dtype: str, end: int | None) -> dict[str, Any]:
    """What config.json holds.

    Args:
        config: the GPT's.
        architecture: what it is there.
        dtype: of the weights, as torch names it.
        end: id of the token that ends a document; ``None`` if there is none.
    """
    values = values_of(config)
    flat = dict(architecture.constants) | {theirs: values[ours] for ours, theirs in architecture.values.items()}
    # Two values have two names, `rope_theta` and `torch_dtype` for releases before 5. Ids of special tokens that are
    # missing would be those of the class.
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **{key: value for key, value in flat.items() if key != "rope_type"},
        **({architecture.further_layers: 0} if architecture.further_layers else {}),
        "rope_parameters": {key: flat[key] for key in _ROPE},
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def config_from_json(content: Mapping[str, Any]) -> tuple[GPTConfig, Architecture]:
    """The GPT that a config.json describes, and the class that it names.

    Raises:
        WeightsError: it is of a class that is not known here, or of a model that no GPT is; all reasons are named.
    """
    architecture = _named_architecture(content)
    flat = dict(architecture.defaults) | _flattened(content, architecture)
    problems = [f"{key}: is missing" for key in architecture.values.values() if key not in (*flat, *_FOLLOWING)]
    problems += [
        f"{key}={flat[key]!r}: a GPT has {expected!r} only"
        for key, expected in architecture.constants.items()
        if flat.get(key, _ABSENT) not in (expected, _ABSENT)
    ]
    if content.get("quantization_config"):
        problems.append(
            "quantization_config: the weights are quantised; give the model in float32, bfloat16 or float16"
        )
    if problems:
        raise WeightsError.from_problems(f"config.json of a {architecture.class_name} that no GPT is", problems)
    given = {ours: flat[theirs] for ours, theirs in architecture.values.items() if theirs in flat}
    return _built({**architecture.required, **given}), architecture


def _lacking(architecture: Architecture, values: Mapping[str, Any]) -> list[str]:
    """What a model has that a class of `transformers` lacks."""
    has_experts = "moe.num_experts" in architecture.values
    if has_experts != ("moe.num_experts" in values):
        return ["has experts, and the model none" if has_experts else "has no experts, and the model has"]
    problems = []
    for name, value in values.items():
        if name in architecture.values or name in TRAINING_ONLY | architecture.unused | {"moe"}:
            continue
        if name not in architecture.required:
            problems.append(f"does not know {name}={value!r}")
        elif value != architecture.required[name]:
            problems.append(f"has {name}={architecture.required[name]!r} only, and the model {value!r}")
    return problems + [
        f"has a {name} of at least {least}, and the model {values[name]!r}"
        for name, least in architecture.least.items()
        if values[name] < least
    ]


def _named_architecture(content: Mapping[str, Any]) -> Architecture:
    known = {a.model_type: a for a in ARCHITECTURES}
    listed = ", ".join(f"{a.model_type!r} ({a.class_name})" for a in ARCHITECTURES)
    model_type = str(content.get("model_type"))
    if model_type not in known:
        raise WeightsError(f"config.json has model_type={model_type!r}, and these can be read: {listed}")
    architecture = known[model_type]
    classes = content.get("architectures") or [architecture.class_name]
    if not isinstance(classes, list) or architecture.class_name not in classes:
        raise WeightsError(f"config.json has architectures={classes!r}, and these can be read: {listed}")
    return architecture


def _flattened(content: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """config.json without nulls, and with what it says of rotary positions under keys of their own, as old releases."""
    given = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope = dict(given) if isinstance(given, Mapping) else {"rope_type": given}
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    if any(isinstance(value, Mapping) for value in rope.values()):
        rope = {"rope_type": "another for every type of layer"}
    flat = dict(content) | {key: rope[key] for key in _ROPE if key in rope}
    renamed = {key: flat[alias] for alias, key in architecture.aliases.items() if alias in flat}
    return {key: value for key, value in (renamed | flat).items() if value is not None}


def _built(values: Mapping[str, Any]) -> GPTConfig:
    """A config from its values."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            nested[name] = value
    try:
        return GPTConfig(**nested)
    except ValueError as error:
        raise WeightsError(f"config.json describes no GPT: {error}") from error
