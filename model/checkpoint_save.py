"""Write a model directory in the layout of the Hugging Face release."""

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..kernels.reference.quant import (
    quantize_fp4_experts,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)
from ..transfer.errors import CheckpointError
from .checkpoint_files import INDEX_FILE, SINGLE_FILE
from .checkpoint_table import (
    VISION_PREFIXES,
    Storage,
    TensorSpec,
    language_tensors,
    scale_name,
    vision_tensors,
)
from .config import config_from_dict

DEFAULT_SHARD_BYTES: Final = 5 << 30

_ELEMENT_BYTES: Final = {Storage.BF16: 2.0, Storage.F32: 4.0, Storage.FP4_PACKED: 0.5}


def save_checkpoint(
    directory: str | Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Quantise float32 `tensors` (released names, logical shapes) as the release stores them, and write all files.

    config: the document of ``config.json``; it is checked and written as it is. Shards hold at most `max_shard_bytes`
    bytes of tensors, or one tensor. Every file appears under its name only when it is complete, the index last, so
    a half-written directory cannot be opened. Other files of the directory are left alone.

    Raises CheckpointError if a tensor is missing, superfluous or misshapen, or if the directory already holds weights.
    """
    target = Path(directory)
    specs = _specs(config, tensors)
    if (target / INDEX_FILE).exists() or (target / SINGLE_FILE).exists():
        raise CheckpointError(f"{target}: already holds a checkpoint; choose another directory")
    target.mkdir(parents=True, exist_ok=True)
    shards = list(_plan_shards(specs, max_shard_bytes))
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored = {
            key: value for name in names for key, value in _stored(name, specs[name], tensors[name])
        }
        weight_map |= dict.fromkeys(stored, file)
        total_bytes += sum(value.nbytes for value in stored.values())
        partial = target / f"{file}.partial"
        save_file(stored, partial, metadata={"format": "pt"})
        _publish(partial, target / file)
    _write_json(target / "config.json", config)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(target / INDEX_FILE, index)


def _specs(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    checked = config_from_dict(config)
    specs = language_tensors(checked)
    if checked.vision_config is not None and any(
        name.startswith(VISION_PREFIXES) for name in tensors
    ):
        specs |= vision_tensors(checked.vision_config, checked.hidden_size)
    for name in sorted(specs.keys() ^ tensors.keys()):
        state = "is missing" if name in specs else "does not belong to this configuration"
        raise CheckpointError(f"tensor {name} {state}")
    for name, spec in specs.items():
        found = tuple(tensors[name].shape)
        if found != spec.shape:
            raise CheckpointError(f"tensor {name} is {list(found)}, expected {list(spec.shape)}")
    return specs


def _plan_shards(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> Iterator[list[str]]:
    """Names in table order, cut where the next tensor would exceed the limit."""
    names: list[str] = []
    used = 0.0
    for name, spec in specs.items():
        size = prod(spec.shape) * _ELEMENT_BYTES.get(spec.storage, 1.0) + prod(
            spec.scale_shape or (0,)
        )
        if names and used + size > max_shard_bytes:
            yield names
            names, used = [], 0.0
        names.append(name)
        used += size
    yield names


def _stored(name: str, spec: TensorSpec, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the file for one logical tensor: itself, or its quantised values and scales."""
    value = tensor.detach().to("cpu", torch.float32)
    match spec.storage:
        case Storage.FP8_BLOCKS:
            packed, scale = quantize_fp8_blocks(value)
        case Storage.FP8_ROWS:
            packed, scale = quantize_fp8_rows(value)
        case Storage.FP4_PACKED:
            packed, scale = quantize_fp4_experts(value)
        case storage:
            yield (
                name,
                value.to(torch.bfloat16 if storage is Storage.BF16 else torch.float32).contiguous(),
            )
            return
    yield name, packed.contiguous()
    yield scale_name(name), scale.contiguous().view(torch.float8_e8m0fnu)


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _publish(partial, path)


def _publish(partial: Path, path: Path) -> None:
    """Give a complete file its name, after its bytes are on disk."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
