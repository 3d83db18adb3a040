"""After a prefix hit: windows are rebuilt by replayed rows, and global KV stays as it is (spec/model.md 10.1)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.model.batch import Logits, Span
from headrace.model.network import Network

from .golden import golden_folder, open_golden, prompts, run_tokens

MAX_LOGIT_DIFFERENCE = 2e-3
SLOT, OTHER_SLOT = 1, 2


def run_after_hit(
    network: Network,
    ids: tuple[int, ...],
    hit: int,
    *,
    floor: int,
    tail_start: int = 0,
    chunk: int = 10_000,
) -> torch.Tensor:
    """Logits [rows, V] of ``ids`` from ``floor`` on, whose first ``hit`` tokens are in the blocks of SLOT."""
    blocks = tuple(range(1, 1 + -(-len(ids) // network.options.block_tokens)))
    network.cache.clear_slot(OTHER_SLOT)
    parts: list[torch.Tensor] = []
    for start in range(floor, len(ids), chunk):
        span = Span(
            token_ids=ids[start : start + chunk],
            start=start,
            history=ids[max(0, start - 3) : start],
            slot=OTHER_SLOT,
            blocks=blocks,
            tail_start=tail_start,
            floor=floor,
            known=hit,
            logits=Logits.ALL,
        )
        parts.append(network.forward([span]))
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [10_000, 33])
@pytest.mark.parametrize(("hit", "keep"), [(200, None), (200, 128), (256, None), (256, 128)])
def test_hits_equal_the_reference(hit: int, keep: int | None, chunk: int, tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    vectors = np.load(folder / "bounded_replay_plain.npz")
    network = open_golden(folder, "plain", tmp_path)
    window = network.config.sliding_window
    for prompt in ("p300", "p700"):
        ids = prompts(folder)[prompt]
        run_tokens(network, ids[:hit], slot=SLOT)
        tail_start = 0 if keep is None else len(ids) - keep
        floor = hit - window
        logits = run_after_hit(network, ids, hit, floor=floor, tail_start=tail_start, chunk=chunk)
        name = "full_decoder" if keep is None else f"keep{keep}"
        expected = vectors[f"{prompt}_ref_hit{hit}_{name}"]
        assert np.abs(logits[-1].numpy() - expected).max() <= MAX_LOGIT_DIFFERENCE, prompt


@pytest.mark.parametrize("numerics", ["released", "plain"])
@pytest.mark.parametrize("chunk", [10_000, 17])
def test_known_entries_stay_and_a_whole_replay_changes_no_bit(
    numerics: str, chunk: int, tmp_path: Path
) -> None:
    folder = golden_folder("v41-spec-micro")
    network = open_golden(folder, numerics, tmp_path)
    ids = prompts(folder)["p200"]
    hit = len(ids) // 2 // network.options.block_tokens * network.options.block_tokens
    whole = torch.from_numpy(run_tokens(network, ids, slot=SLOT))
    cached = network.cache.blocks[1:].clone()
    again = run_after_hit(network, ids, hit, floor=0, chunk=chunk)
    assert torch.equal(again, whole)
    assert torch.equal(network.cache.blocks[1:], cached)
    window = network.config.sliding_window
    network.cache.blocks[1 : 1 + hit // network.options.block_tokens].fill_(7)
    before = network.cache.blocks.clone()
    run_after_hit(network, ids, hit, floor=max(0, hit - window), chunk=chunk)
    full = slice(1, 1 + hit // network.options.block_tokens)
    assert torch.equal(network.cache.blocks[full], before[full]), "a known entry was written"


def test_windows_are_exact_where_the_replay_reaches_far_enough(tmp_path: Path) -> None:
    """Each layer widens what a row depends on by a window less one; beyond that a floor is not felt."""
    folder = golden_folder("v41-spec-micro")
    network = open_golden(folder, "released", tmp_path)
    window, layers = network.config.sliding_window, network.config.num_hidden_layers
    ids = prompts(folder)["p200"]
    reach = layers * (window - 1)
    floor = 16
    assert reach + floor + 8 < len(ids), "the prompt is too short to show anything"
    whole = torch.from_numpy(run_tokens(network, ids, slot=SLOT))
    block_tokens = network.options.block_tokens
    hit = -(-(floor + reach) // block_tokens) * block_tokens
    again = run_after_hit(network, ids, hit, floor=floor)
    assert torch.equal(again[reach:], whole[floor + reach :])
    assert not torch.equal(again[: window // 2], whole[floor : floor + window // 2])
