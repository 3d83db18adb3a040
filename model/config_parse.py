"""From the keys of a ``config.json`` to typed values: nothing missing, nothing unknown, nothing of another type.

Keys that headrace supports with one value only are checked and dropped here, so they are no fields of ModelConfig.
Source: spec model.md section 0.4.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from ..transfer.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

#: Keys of which only these values are implemented. A key of OPTIONAL may be absent, then its default applies.
FIXED_TOP: Final = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
}
FIXED_TEXT: Final = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
FIXED_QUANTIZATION: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
OPTIONAL_TEXT: Final = {
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
    "hc_pre_from_prev_sublayer": True,
    "q_head_norm": False,
}
FIXED_VISION: Final = {"model_type": "deepseek_v41_vision"}

#: Bookkeeping that does not change what the model computes.
IGNORED: Final = frozenset(
    {"initializer_range", "transformers_version", "use_cache", "_name_or_path"}
)
TOKEN_KEYS: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


def split_document(document: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Check the fixed keys; return the fields of the text model (token ids joined in) and those of the vision tower."""
    top = dict(document)
    text = _section(top, "text_config")
    vision = _section(top, "vision_config") if top.get("vision_config") is not None else None
    top.pop("vision_config", None)
    quantization = _section(top, "quantization_config")
    _take_fixed(top, FIXED_TOP, "")
    _take_fixed(quantization, FIXED_QUANTIZATION, "quantization_config.")
    _refuse_unknown(quantization, "quantization_config.", ())
    _take_fixed(text, FIXED_TEXT, "text_config.")
    _take_optional(text, OPTIONAL_TEXT, "text_config.")
    _take_optional(top, {"tokenizer_compatibility": "release"}, "")
    if "kv_source_layer_ids" in text:
        same = {"index_k_source_layer_ids": text["kv_source_layer_ids"]}
        _take_optional(text, same, "text_config.")
    scaling = _section(text, "rope_scaling", "text_config.")
    _take_fixed(scaling, {"rope_type": "yarn"}, "text_config.rope_scaling.")
    if vision is not None:
        _take_fixed(vision, FIXED_VISION, "vision_config.")
    for key in TOKEN_KEYS:
        if key not in top:
            raise CheckpointError(f"{key} is missing")
        text[key] = top.pop(key)
    _refuse_unknown(
        top, "", ("text_config", "vision_config", "quantization_config", *FIXED_TOP, *TOKEN_KEYS)
    )
    return {**_without_ignored(text), "rope_scaling": scaling}, vision


def parse_fields(
    cls: type[T], values: Mapping[str, Any], where: str, made: Mapping[str, Any] | None = None
) -> T:
    """Build dataclass `cls` from `values` plus the ready-made fields `made`.

    Raises CheckpointError for a missing or unknown key or a value of another type.
    """
    ready = dict(made or {})
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    _refuse_unknown({key: None for key in values if key not in names}, f"{where}.", names)
    for field in fields(cls):
        if field.name in ready:
            continue
        key = field.name if field.name in TOKEN_KEYS else f"{where}.{field.name}"
        if field.name in values:
            ready[field.name] = _convert(values[field.name], hints[field.name], key)
        elif field.default is MISSING:
            raise CheckpointError(f"{key} is missing")
    return cls(**ready)


def _convert(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as the annotated type: int, float, optional of these, or a tuple of ints."""
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(option for option in get_args(hint) if option is not type(None))
        return None if value is None else _convert(value, hint, key)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise CheckpointError(f"{key} is {value!r}, expected a list of integers")
        return tuple(_convert(item, int, f"{key}[{index}]") for index, item in enumerate(value))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    wanted = {int: "an integer", float: "a number"}[hint]
    raise CheckpointError(f"{key} is {value!r}, expected {wanted}")


def _section(values: dict[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
    """Take the object `key` out of `values`."""
    section = values.pop(key, None)
    if not isinstance(section, dict):
        raise CheckpointError(f"{prefix}{key} is {section!r}, expected an object")
    return dict(section)


def _take_fixed(values: dict[str, Any], fixed: Mapping[str, Any], prefix: str) -> None:
    for key in fixed:
        if key not in values:
            raise CheckpointError(f"{prefix}{key} is missing; it must be {fixed[key]!r}")
    _take_optional(values, fixed, prefix)


def _take_optional(values: dict[str, Any], fixed: Mapping[str, Any], prefix: str) -> None:
    for key, allowed in fixed.items():
        found = values.pop(key, allowed)
        if found != allowed:
            raise CheckpointError(f"{prefix}{key} is {found!r}; only {allowed!r} is supported")


def _refuse_unknown(values: Mapping[str, Any], prefix: str, known: Any) -> None:
    unknown = sorted(_without_ignored(values))
    if unknown:
        listed = ", ".join(prefix + key for key in unknown)
        hint = f" (known: {', '.join(sorted(known))})" if known else ""
        raise CheckpointError(f"unknown key {listed}: headrace cannot tell what it changes{hint}")


def _without_ignored(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in IGNORED}
