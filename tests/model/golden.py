"""Golden vectors of an independent implementation, and the network opened as they were computed.

``v41-spec-micro`` is a fixture of this repository; ``v41-micro`` (14 MB) is read from ``../shared`` beside the
checkout.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.model.batch import Logits, Span
from headrace.model.network import Network, Observer, load_network
from headrace.model.network_options import NetworkOptions

FIXTURES = Path(__file__).parents[1] / "data" / "golden"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "golden"
PLAIN_SWIGLU_LIMIT = 1000.0
"""The plain vectors were made without a clamp: see their README."""


def golden_folder(name: str) -> Path:
    """Folder of a set of vectors; skips the test where it is not on this machine."""
    for root in (FIXTURES, SHARED):
        if (root / name / "checkpoint").is_dir():
            return root / name
    pytest.skip(f"golden vectors {name} are not beside this checkout")


def prompts(folder: Path) -> dict[str, tuple[int, ...]]:
    """Token ids by prompt name."""
    entries = json.loads((folder / "prompts.json").read_text())
    return {entry["name"]: tuple(entry["ids"]) for entry in entries}


def checkpoint_for(folder: Path, numerics: str, tmp_path: Path) -> Path:
    """The checkpoint, with the SwiGLU limit that the vectors of this mode were made with."""
    if numerics == "released":
        return folder / "checkpoint"
    copy = tmp_path / f"{folder.name}-plain"
    copy.mkdir()
    for file in (folder / "checkpoint").iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file)
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = PLAIN_SWIGLU_LIMIT
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def open_golden(
    folder: Path,
    numerics: str,
    tmp_path: Path,
    *,
    deterministic: bool = True,
    keep: int | None = None,
    block_tokens: int = 16,
) -> Network:
    """The network of a set of vectors, with room for two requests of 800 tokens."""
    torch.set_num_threads(1)
    options = NetworkOptions(
        numerics=numerics,
        deterministic=deterministic,
        block_tokens=block_tokens,
        num_blocks=1 + 1600 // block_tokens,
        num_slots=3,
        keep=keep,
    )
    return load_network(checkpoint_for(folder, numerics, tmp_path), options=options)


def run_tokens(
    network: Network,
    ids: tuple[int, ...],
    *,
    chunk: int = 10_000,
    tail_start: int = 0,
    slot: int = 1,
    observe: Observer | None = None,
) -> np.ndarray:
    """Logits [rows that ran the decoder layers, V] of ``ids``, run ``chunk`` rows at a time in a fresh slot."""
    block_tokens = network.options.block_tokens
    first = 1 + (slot - 1) * (800 // block_tokens)
    blocks = tuple(range(first, first + -(-len(ids) // block_tokens)))
    network.cache.clear_slot(slot)
    parts: list[torch.Tensor] = []
    for start in range(0, len(ids), chunk):
        span = Span(
            token_ids=ids[start : start + chunk],
            start=start,
            history=ids[max(0, start - 3) : start],
            slot=slot,
            blocks=blocks,
            tail_start=tail_start,
            logits=Logits.ALL,
        )
        parts.append(network.forward([span], observe))
    return torch.cat(parts).numpy()


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Cosine of every pair of rows."""
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return (left * right).sum(axis=1) / norms
