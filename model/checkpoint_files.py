"""The safetensors files of a model directory: which tensor lies where, read from index and headers only."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..transfer.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_PREFIX: Final = "model."
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and how. key: its name inside `file`, possibly with the ``model.`` prefix."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]


class Shards:
    """Open, memory-mapped files. tensors: name without ``model.`` -> StoredTensor."""

    def __init__(self, tensors: Mapping[str, StoredTensor], handles: Mapping[str, Any]) -> None:
        self.tensors = tensors
        self._handles = handles

    def load(self, name: str) -> Tensor:
        """The tensor as stored; a private mapping of the file, so nothing is read before it is used."""
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"the checkpoint holds no tensor {name}")
        return self._handles[stored.file].get_tensor(stored.key)


def open_shards(directory: Path) -> Shards:
    """Open every file that the index names, or the single file when there is no index.

    Raises CheckpointError for a missing, truncated or foreign file, and for an index that disagrees with the headers.
    """
    index = _read_index(directory)
    files = [SINGLE_FILE] if index is None else sorted(set(index.values()))
    handles = {file: _open(directory, file) for file in files}
    tensors: dict[str, StoredTensor] = {}
    for file, handle in handles.items():
        for stored in _headers(file, handle):
            name = stored.key.removeprefix(_PREFIX)
            if name in tensors:
                raise CheckpointError(
                    f"{directory}: tensor {name} is in {tensors[name].file} and again in {file}"
                )
            tensors[name] = stored
    if index is not None:
        _compare_with_index(directory, index, tensors)
    return Shards(tensors, handles)


def _read_index(directory: Path) -> dict[str, str] | None:
    """The weight map (tensor -> file) of the index, None if the directory has a single file and no index."""
    path = directory / INDEX_FILE
    if not path.exists():
        if (directory / SINGLE_FILE).exists():
            return None
        pickled = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLED)
        hint = f"; pickled weights ({pickled[0]}) are never loaded" if pickled else ""
        raise CheckpointError(f"{directory}: neither {INDEX_FILE} nor {SINGLE_FILE} is here{hint}")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected JSON with an object 'weight_map' from tensor to file ({error!r})"
        ) from error
    for name, file in files.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {name} is said to be in {file!r};"
                " only .safetensors files of this directory are read"
            )
    return files


def _open(directory: Path, file: str) -> Any:
    path = directory / file
    if not path.is_file():
        raise CheckpointError(f"{path}: file is missing, though {INDEX_FILE} names it")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or not a safetensors file ({error}); fetch it again"
        ) from error


def _headers(file: str, handle: Any) -> Iterator[StoredTensor]:
    for key in handle.keys():  # noqa: SIM118 (a safetensors file, not a mapping)
        piece = handle.get_slice(key)
        yield StoredTensor(file, key, piece.get_dtype(), tuple(piece.get_shape()))


def _compare_with_index(
    directory: Path, index: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> None:
    placed = {stored.key: stored.file for stored in tensors.values()}
    for key in sorted(index.keys() | placed.keys()):
        if index.get(key) != placed.get(key):
            raise CheckpointError(
                f"{directory / INDEX_FILE}: tensor {key} should be in {index.get(key)},"
                f" but is in {placed.get(key)}"
            )
