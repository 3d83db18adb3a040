"""Under ``deterministic`` a row is the same bits in any chunk, beside any neighbour, anywhere in the caches."""

from pathlib import Path

import pytest
import torch

from headrace.model.batch import Logits, Span
from headrace.model.network import Network

from .golden import golden_folder, open_golden, prompts, run_tokens

NEIGHBOUR_TOKENS = 5


def beside_a_neighbour(network: Network, ids: tuple[int, ...], chunk: int) -> torch.Tensor:
    """Logits of ``ids`` in slot 2, while slot 1 runs other rows first in every pass."""
    blocks = tuple(range(61, 61 + -(-len(ids) // network.options.block_tokens)))
    other = tuple(reversed(ids)) * 4
    network.cache.clear_slot(1)
    network.cache.clear_slot(2)
    parts: list[torch.Tensor] = []
    for number, start in enumerate(range(0, len(ids), chunk)):
        begin = number * NEIGHBOUR_TOKENS
        neighbour = Span(
            token_ids=other[begin : begin + NEIGHBOUR_TOKENS],
            start=begin,
            history=other[max(0, begin - 3) : begin],
            slot=1,
            blocks=tuple(range(1, 60)),
        )
        span = Span(
            token_ids=ids[start : start + chunk],
            start=start,
            history=ids[max(0, start - 3) : start],
            slot=2,
            blocks=blocks,
            logits=Logits.ALL,
        )
        parts.append(network.forward([neighbour, span]))
    return torch.cat(parts)


@pytest.mark.parametrize("numerics", ["released", "plain"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 37, 100])
def test_bits_do_not_depend_on_chunks_or_neighbours(
    numerics: str, chunk: int, tmp_path: Path
) -> None:
    folder = golden_folder("v41-spec-micro")
    network = open_golden(folder, numerics, tmp_path)
    for name in ("p20", "p90", "p200") if chunk >= 16 else ("p20",):
        ids = prompts(folder)[name]
        whole = torch.from_numpy(run_tokens(network, ids))
        assert torch.equal(torch.from_numpy(run_tokens(network, ids, chunk=chunk, slot=2)), whole)
        assert torch.equal(beside_a_neighbour(network, ids, chunk), whole)
