"""The network cut between prefill and decode: an encoder part and a decoder part compute what the whole one does."""

from pathlib import Path

import pytest
import torch

from headrace.model.batch import Logits, Span
from headrace.model.drafter import DraftSpan
from headrace.model.network import Network, load_network
from headrace.model.network_options import NetworkOptions, Part
from headrace.transfer.errors import ConfigError

from .golden import checkpoint_for, golden_folder, prompts

KEEP, BLOCK_TOKENS = 20, 16
SLOT = 1


def open_part(part: Part, numerics: str, tmp_path: Path) -> Network:
    torch.set_num_threads(1)
    options = NetworkOptions(
        numerics=numerics,
        block_tokens=BLOCK_TOKENS,
        num_blocks=40,
        num_slots=3,
        keep=KEEP,
        part=part,
        num_tails=3 if part == "decoder" else 0,
    )
    folder = golden_folder("v41-spec-micro")
    own = tmp_path / part
    own.mkdir(exist_ok=True)
    checkpoint = own / f"{folder.name}-{numerics}"
    if not checkpoint.is_dir():
        checkpoint = checkpoint_for(folder, numerics, own)
    return load_network(checkpoint, options=options)


def spans(ids: tuple[int, ...], chunk: int, *, tail: int, floor: int = 0) -> list[Span]:
    """The rows that prefill runs: all but the last."""
    blocks = tuple(range(1, 1 + -(-len(ids) // BLOCK_TOKENS)))
    return [
        Span(
            token_ids=ids[start : min(start + chunk, len(ids) - 1)],
            start=start,
            history=ids[max(0, start - 3) : start],
            slot=SLOT,
            blocks=blocks,
            tail_start=max(0, len(ids) - KEEP),
            floor=floor,
            known=floor,
            tail=tail,
        )
        for start in range(floor, len(ids) - 1, chunk)
    ]


def hand_over(source: Network, target: Network, tail: tuple[int, int]) -> None:
    """Copy what a handoff copies: blocks, the part of a slot that travels, and one tail."""
    layout = source.cache.layout
    assert layout == target.cache.layout
    handed = layout.slot_bytes - layout.private_bytes
    target.cache.blocks.copy_(source.cache.blocks)
    target.cache.slots[:, :handed] = source.cache.slots[:, :handed]
    target.cache.tails[tail[1]] = source.cache.tails[tail[0]]


def late_span(ids: tuple[int, ...], begin: int, end: int, tail: int, floor: int = 0) -> Span:
    (example, *_) = spans(ids, 10_000, tail=tail, floor=floor)
    return Span(
        token_ids=ids[begin:end],
        start=begin,
        history=(),
        slot=SLOT,
        blocks=example.blocks,
        tail_start=example.tail_start,
        floor=floor,
        tail=tail,
        late=True,
    )


def last_row(ids: tuple[int, ...]) -> Span:
    start = len(ids) - 1
    return Span(
        token_ids=ids[start:],
        start=start,
        history=ids[start - 3 : start],
        slot=SLOT,
        blocks=tuple(range(1, 1 + -(-len(ids) // BLOCK_TOKENS))),
        tail_start=max(0, len(ids) - KEEP),
        logits=Logits.LAST,
    )


@pytest.mark.parametrize("numerics", ["released", "plain"])
@pytest.mark.parametrize("name", ["p20", "p90", "p200"])
@pytest.mark.parametrize(("chunk", "late_rows"), [(10_000, 10_000), (7, 6), (33, 1)])
def test_the_parts_compute_what_the_whole_does(
    numerics: str, name: str, chunk: int, late_rows: int, tmp_path: Path
) -> None:
    ids = prompts(golden_folder("v41-spec-micro"))[name]
    whole, encoder, decoder = (
        open_part(part, numerics, tmp_path) for part in ("whole", "encoder", "decoder")
    )
    for span in spans(ids, chunk, tail=0):
        whole.forward([span])
    for span in spans(ids, chunk, tail=2):
        assert encoder.forward([span]).shape[0] == 0
    hand_over(encoder, decoder, (2, 1))
    first = max(0, len(ids) - KEEP)
    for begin in range(first, len(ids) - 1, late_rows):
        end = min(begin + late_rows, len(ids) - 1)
        decoder.forward([late_span(ids, begin, end, 1)])
    expected = whole.forward([last_row(ids)])
    assert torch.equal(decoder.forward([last_row(ids)]), expected)
    assert torch.equal(decoder.cache.blocks, whole.cache.blocks)
    assert torch.equal(decoder.cache.slots[SLOT], whole.cache.slots[SLOT])
    anchor = DraftSpan(token_id=7, position=len(ids), slot=SLOT, floor=first)
    drafts = [
        network.drafter.draft((anchor,), lambda _, logits: logits.argmax(-1).tolist(), 3).ids
        for network in (whole, decoder)
        if network.drafter is not None
    ]
    assert not drafts or torch.equal(*drafts)


def test_late_rows_share_a_pass_with_others_and_change_no_bit(tmp_path: Path) -> None:
    table = prompts(golden_folder("v41-spec-micro"))
    ids, other = table["p90"], table["p20"]
    encoder, decoder = (open_part(part, "released", tmp_path) for part in ("encoder", "decoder"))
    for span in spans(ids, 30, tail=1):
        encoder.forward([span])
    hand_over(encoder, decoder, (1, 1))
    first = len(ids) - KEEP
    beside = Span(token_ids=other, start=0, history=(), slot=2, blocks=(30, 31), logits=Logits.ALL)
    alone = decoder.forward([beside])
    together = decoder.forward([late_span(ids, first, len(ids) - 1, 1), beside])
    assert torch.equal(together, alone)
    shared = decoder.forward([last_row(ids)])
    again = open_part("decoder", "released", tmp_path)
    hand_over(encoder, again, (1, 2))
    again.forward([late_span(ids, first, len(ids) - 1, 2)])
    assert torch.equal(again.forward([last_row(ids)]), shared)


def test_the_encoder_part_holds_less(tmp_path: Path) -> None:
    whole, encoder = (open_part(part, "released", tmp_path) for part in ("whole", "encoder"))
    split, layers = whole.config.split_layer, whole.config.num_hidden_layers
    rows = [network.expert_store.arena.shape[0] for network in (whole, encoder)]
    slots = whole.expert_store.slots_per_rank
    assert rows == [(layers + 1) * slots, (split + 1) * slots]
    assert encoder.expert_counts.series()[1].shape[1] == split
    assert encoder.drafter is None
    assert not hasattr(encoder, "_head")


@pytest.mark.parametrize(("part", "num_tails"), [("whole", 1), ("encoder", 1), ("decoder", 0)])
def test_tails_belong_to_parts(part: Part, num_tails: int) -> None:
    with pytest.raises(ConfigError, match=f"num_tails = {num_tails} with part = '{part}'"):
        NetworkOptions(part=part, num_tails=num_tails)
