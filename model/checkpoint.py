"""A model directory in the layout of the Hugging Face release, opened without reading weights.

Opening reads ``config.json``, the index and the safetensors headers and compares every name, shape and type with
``checkpoint_table``. Tensors are memory-mapped: a rank pays for what it touches. Nothing here executes anything that
a directory contains; pickled weights are refused.

Source: spec model.md sections 8.2 to 8.4.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..kernels.reference.quant import (
    dequantize_fp4_experts,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
)
from ..transfer.errors import CheckpointError
from .checkpoint_files import Shards, StoredTensor, open_shards
from .checkpoint_table import (
    VISION_PREFIXES,
    Storage,
    TensorSpec,
    language_tensors,
    scale_name,
    vision_tensors,
)
from .config import ModelConfig, load_config

_MAX_PROBLEMS = 12
_SAMPLE_BYTES: Final = 4096


class Checkpoint:
    """Weights of one model, by released name (without ``model.``).

    config: the checked configuration. specs: logical shape and storage of every tensor that it holds, scales aside.
    """

    def __init__(self, directory: str | Path) -> None:
        """Open and validate `directory`; raises CheckpointError that lists what is wrong."""
        self.directory = Path(directory)
        self.config: ModelConfig = load_config(self.directory)
        self._shards: Shards = open_shards(self.directory)
        self.specs: dict[str, TensorSpec] = _specs(self.config, self._shards.tensors)
        _validate(self.directory, self.specs, self._shards.tensors)

    def raw(self, name: str) -> Tensor:
        """The stored tensor, memory-mapped: packed int8, ``float8_e4m3fn``, ``float8_e8m0fnu``, bfloat16 or float32.

        Do not write to it. Raises CheckpointError for a name that the checkpoint does not hold.
        """
        return self._shards.load(name)

    def scale(self, name: str) -> Tensor:
        """E8M0 scales of the quantised tensor `name` as uint8 bytes, memory-mapped."""
        return self.raw(scale_name(name)).view(torch.uint8)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor in its logical shape, dequantised, as `dtype`. A fresh tensor unless stored so already."""
        raw = self.raw(name)
        match self.specs[name].storage if name in self.specs else Storage.F32:
            case Storage.FP8_BLOCKS:
                raw = dequantize_fp8_blocks(raw, self.scale(name))
            case Storage.FP8_ROWS:
                raw = dequantize_fp8_rows(raw, self.scale(name))
            case Storage.FP4_PACKED:
                raw = dequantize_fp4_experts(raw, self.scale(name))
            case _:
                pass
        return raw.to(dtype)

    def fingerprint(self) -> str:
        """32 hex digits that name this model's content, for KV block hashes; see the function of this name."""
        digest = hashlib.blake2b(digest_size=16)
        for file in ("config.json", "tokenizer.json"):
            path = self.directory / file
            digest.update(file.encode() + (path.read_bytes() if path.exists() else b""))
        for name in sorted(self._shards.tensors):
            stored = self._shards.tensors[name]
            digest.update(f"{name} {stored.dtype} {stored.shape}".encode())
            digest.update(_sample(self._shards.load(name)))
        return digest.hexdigest()


def fingerprint(directory: str | Path) -> str:
    """Content fingerprint of a checkpoint: 32 hex digits.

    Covers config, tokenizer (the Engram map comes from it), every tensor's name, type and shape, and the first and
    last 4 KiB of every tensor's bytes: seconds for the released 475 GiB, and independent of the sharding.
    """
    return Checkpoint(directory).fingerprint()


def _sample(tensor: Tensor) -> bytes:
    stored = tensor.reshape(-1).view(torch.uint8)
    if stored.numel() > 2 * _SAMPLE_BYTES:
        stored = torch.cat((stored[:_SAMPLE_BYTES], stored[-_SAMPLE_BYTES:]))
    return stored.numpy().tobytes()


def _specs(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, TensorSpec]:
    """What must be there: the language model, and the vision path if any of it is present."""
    specs = language_tensors(config)
    if config.vision_config is not None and any(
        name.startswith(VISION_PREFIXES) for name in stored
    ):
        specs |= vision_tensors(config.vision_config, config.hidden_size)
    return specs


def _validate(
    directory: Path, specs: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]
) -> None:
    """Raise one CheckpointError that lists missing, extra, misshapen and mistyped tensors, with their files."""
    problems: list[str] = []
    expected: set[str] = set()
    for name, spec in specs.items():
        wanted = [(name, spec.storage.dtype, spec.stored_shape)]
        if spec.scale_shape is not None:
            wanted.append((scale_name(name), Storage.SCALE.dtype, spec.scale_shape))
        for key, dtype, shape in wanted:
            expected.add(key)
            found = stored.get(key)
            if found is None:
                partner = f", the scale of {name}" if key != name else ""
                problems.append(f"{key} is missing{partner}: expected {dtype} {list(shape)}")
            elif (found.dtype, found.shape) != (dtype, shape):
                problems.append(
                    f"{found.file}: {key} is {found.dtype} {list(found.shape)},"
                    f" expected {dtype} {list(shape)}"
                )
    extra = (name for name in stored if name not in expected)
    problems.extend(
        f"{stored[name].file}: {name} does not belong to this configuration"
        for name in extra
        if not name.startswith(VISION_PREFIXES)
    )
    if problems:
        shown = "\n  ".join(problems[:_MAX_PROBLEMS])
        rest = len(problems) - _MAX_PROBLEMS
        more = f"\n  and {rest} more" if rest > 0 else ""
        raise CheckpointError(
            f"{directory}: {len(problems)} tensors do not match config.json:\n  {shown}{more}"
        )
