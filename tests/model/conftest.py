"""Checkpoints and configurations that the tests of model/ read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.model.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LARGER_GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden"


@pytest.fixture
def spec_micro() -> Path:
    """Directory of the small golden checkpoint, for reading."""
    return GOLDEN / "v41-spec-micro" / "checkpoint"


@pytest.fixture
def micro() -> Path:
    """Directory of the larger golden checkpoint; skips where it is not at hand."""
    directory = LARGER_GOLDEN / "v41-micro" / "checkpoint"
    if not directory.is_dir():
        pytest.skip("the larger golden checkpoint is not here")
    return directory


@pytest.fixture
def copy_of_spec_micro(spec_micro: Path, tmp_path: Path) -> Path:
    """A writable copy of the small golden checkpoint."""
    return Path(shutil.copytree(spec_micro, tmp_path / "checkpoint"))


@pytest.fixture
def document(spec_micro: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of the small golden checkpoint, free to change."""
    return json.loads((spec_micro / "config.json").read_text())


@pytest.fixture
def released() -> dict[str, Any]:
    """``config.json`` of the release, from spec model.md section 0.4."""
    return json.loads((GOLDEN.parent / "released_config.json").read_text())


@pytest.fixture
def rewrite(copy_of_spec_micro: Path) -> Callable[..., Path]:
    """Return a function that rewrites the tensors of the copy through `change` and drops its index."""

    def apply(change: Callable[[dict[str, Any]], None]) -> Path:
        path = copy_of_spec_micro / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path)
        (copy_of_spec_micro / "model.safetensors.index.json").unlink()
        return copy_of_spec_micro

    return apply


@pytest.fixture
def checkpoint(spec_micro: Path) -> Checkpoint:
    """The small golden checkpoint, opened."""
    return Checkpoint(spec_micro)
