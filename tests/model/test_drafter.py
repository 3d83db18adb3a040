"""The drafter against an independent reference and ftllm 1.9.0, and what a caller may rely on."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.model.batch import Logits, Span
from headrace.model.config import load_config
from headrace.model.drafter import (
    TEMPERATURES_FILE,
    Drafter,
    Drafts,
    DraftSpan,
    draft_temperatures,
)
from headrace.model.network import Network, load_network
from headrace.model.network_options import NetworkOptions
from headrace.transfer.errors import CheckpointError

from .golden import golden_folder, open_golden, prompts, run_tokens

MAX_LOGIT_DIFFERENCE = 1e-3
"""Of plain mode, as for the backbone's logits."""
MAX_CONFIDENCE_DIFFERENCE = 1e-4
QUANT_COSINE = 0.993
"""5 % quantile of quant mode, the bar of the vectors' README for any rows."""
QUANT_SAME_ROUNDS = 0.9
"""Rounds of which ftllm accepted as many drafts; a flipped rounding may move a near-tie."""


def greedy(_place: int, logits: Tensor) -> list[int]:
    return logits.argmax(dim=1).tolist()


def drafter_of(network: Network) -> Drafter:
    assert network.drafter is not None
    return network.drafter


def continue_with(
    network: Network, ids: tuple[int, ...], start: int, slot: int, blocks: range
) -> Tensor:
    """Compute rows ``start`` .. of ``ids``; logits of all of them."""
    span = Span(
        token_ids=ids[start:],
        start=start,
        history=ids[max(0, start - 3) : start],
        slot=slot,
        blocks=tuple(blocks),
        logits=Logits.ALL,
    )
    return network.forward([span])


class Round:
    """What one block of drafts came to, beside the recorded one."""

    def __init__(self, number: int, drafts: Drafts, logits: Tensor, accepted: int) -> None:
        self.number, self.drafts, self.logits, self.accepted = number, drafts, logits, accepted


def rounds(
    network: Network, prompt: tuple[int, ...], tokens: tuple[int, ...], anchors: Sequence[int]
) -> Iterator[Round]:
    """Greedy drafts after every ``anchors`` index into ``tokens``, the answer that follows ``prompt``."""
    text, blocks, done = prompt + tokens, range(1, 51), 0
    network.cache.clear_slot(1)
    for number, anchor in enumerate(anchors):
        position = len(prompt) + anchor
        continue_with(network, text[:position], done, 1, blocks)
        done = position
        seen: list[Tensor] = []

        def choose(place: int, logits: Tensor, seen: list[Tensor] = seen) -> list[int]:
            seen.append(logits[0].clone())
            return greedy(place, logits)

        span = DraftSpan(token_id=text[position], position=position, slot=1)
        drafts = drafter_of(network).draft([span], choose)
        following = list(text[position + 1 : position + 6])
        matches = [a == b for a, b in zip(drafts.ids[0].tolist(), following, strict=False)]
        accepted = matches.index(False) if False in matches else len(matches)
        yield Round(number, drafts, torch.stack(seen), accepted)


@pytest.mark.parametrize("prompt", ["p5", "p40", "p130", "p300"])
def test_plain_drafts_equal_the_reference_and_ftllms_accepted_lengths(
    prompt: str, tmp_path: Path
) -> None:
    folder = golden_folder("v41-micro")
    network = open_golden(folder, "plain", tmp_path)
    vectors = np.load(folder / "dspark_ref.npz")
    tokens = tuple(json.loads((folder / "dspark_ftllm.json").read_text())[prompt]["tokens"])
    anchors = vectors[f"{prompt}_plain_anchor_index"].tolist()
    for made in rounds(network, prompts(folder)[prompt], tokens, anchors):
        ids = vectors[f"{prompt}_plain_drafts"][made.number]
        assert made.drafts.ids[0].tolist() == ids.tolist()
        confidence = vectors[f"{prompt}_plain_confidence"][made.number]
        difference = np.abs(made.drafts.confidences[0].numpy() - confidence).max()
        assert difference <= MAX_CONFIDENCE_DIFFERENCE
        if made.number < 6:
            logits = vectors[f"{prompt}_plain_logits_first6"][made.number]
            assert np.abs(made.logits.numpy() - logits).max() <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("prompt", ["p40", "p300"])
def test_released_drafts_meet_the_quantisation_noise(prompt: str, tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    network = open_golden(folder, "released", tmp_path)
    vectors = np.load(folder / "dspark_ref.npz")
    recorded = json.loads((folder / "dspark_ftllm.json").read_text())[prompt]
    tokens = tuple(recorded["tokens"])
    anchors = vectors[f"{prompt}_fp32_anchor_index"].tolist()
    made = list(rounds(network, prompts(folder)[prompt], tokens, anchors))
    cosines = [
        float(torch.cosine_similarity(ours, torch.from_numpy(theirs), dim=0))
        for one, logits in zip(made, vectors[f"{prompt}_fp32_logits_first6"], strict=False)
        for ours, theirs in zip(one.logits, logits, strict=True)
    ]
    assert np.quantile(cosines, 0.05) >= QUANT_COSINE
    # the last rounds of ftllm sent fewer drafts, because the answer ended
    pairs = list(zip(made, recorded["sent_accepted"], strict=True))
    same = [one.accepted == accepted for one, (sent, accepted) in pairs if sent == 5]
    assert sum(same) >= QUANT_SAME_ROUNDS * len(same)


@pytest.fixture
def network(tmp_path: Path) -> Network:
    """The small golden checkpoint after two prompts, in slots 1 and 2."""
    folder = golden_folder("v41-spec-micro")
    network = open_golden(folder, "released", tmp_path)
    for slot, name in ((1, "p20"), (2, "p90")):
        run_tokens(network, prompts(folder)[name], slot=slot)
    return network


FIRST = DraftSpan(token_id=7, position=20, slot=1)
SECOND = DraftSpan(token_id=9, position=90, slot=2)


def test_drafts_do_not_depend_on_neighbours_and_fewer_are_the_first_of_more(
    network: Network,
) -> None:
    drafter = drafter_of(network)
    alone = drafter.draft([SECOND], greedy)
    for anchors in ([FIRST, SECOND], [FIRST, SECOND, FIRST]):
        together = drafter.draft(anchors, greedy)
        assert torch.equal(together.ids[1], alone.ids[0])
        assert torch.equal(together.confidences[1], alone.confidences[0])
    assert alone.ids.shape == (1, drafter.block_size)
    for number in range(1, drafter.block_size):
        fewer = drafter.draft([SECOND], greedy, number)
        assert torch.equal(fewer.ids, alone.ids[:, :number])
        assert torch.equal(fewer.confidences, alone.confidences[:, :number])


def test_a_draft_follows_the_choices_before_it(network: Network) -> None:
    drafter = drafter_of(network)
    seen: list[tuple[int, Tensor]] = []

    def stubborn(place: int, logits: Tensor) -> list[int]:
        seen.append((place, logits))
        return [3]

    made = drafter.draft([SECOND], stubborn)
    assert made.ids.tolist() == [[3] * drafter.block_size]
    assert [place for place, _ in seen] == list(range(drafter.block_size))
    other = drafter.draft([SECOND], greedy)
    assert other.ids[0, 0] != 3
    assert other.confidences[0, 0] == made.confidences[0, 0]
    assert other.confidences[0, 1] != made.confidences[0, 1]


def test_drafting_writes_nothing_and_reads_the_slot_alone(network: Network) -> None:
    drafter, cache = drafter_of(network), network.cache
    before = cache.slots.clone()
    made = drafter.draft([FIRST, SECOND], greedy)
    assert torch.equal(cache.slots, before)
    cache.slots[2] = cache.slots[1]
    moved = drafter.draft([DraftSpan(token_id=7, position=20, slot=2)], greedy)
    assert torch.equal(moved.confidences[0], made.confidences[0])


def test_context_before_the_floor_is_not_seen(network: Network) -> None:
    drafter, cache = drafter_of(network), network.cache
    floored = DraftSpan(token_id=9, position=90, slot=2, floor=86)
    whole = drafter.draft([SECOND], greedy)
    first = drafter.draft([floored], greedy)
    assert not torch.equal(first.confidences, whole.confidences)
    ring_rows = cache.layout.ring_rows
    for ring in cache.window[network.config.num_hidden_layers :]:
        for position in range(90 - network.config.sliding_window, 86):
            ring[2, position % ring_rows] = 0
    assert torch.equal(drafter.draft([floored], greedy).confidences, first.confidences)


def test_a_fresh_request_drafts_from_its_anchor_alone(network: Network) -> None:
    fresh = drafter_of(network).draft([DraftSpan(token_id=0, position=0, slot=1)], greedy)
    again = drafter_of(network).draft([DraftSpan(token_id=0, position=0, slot=2)], greedy)
    assert torch.equal(fresh.confidences, again.confidences)
    assert bool(fresh.confidences.isfinite().all())


def test_context_is_the_same_in_chunks_and_after_rejected_drafts(network: Network) -> None:
    ids = prompts(golden_folder("v41-spec-micro"))["p90"]
    expected = drafter_of(network).draft([SECOND], greedy)
    run_tokens(network, ids, chunk=7, slot=2)
    assert torch.equal(
        drafter_of(network).draft([SECOND], greedy).confidences, expected.confidences
    )
    wrong = (*ids[:85], 1, 2, 3, 4, 5, 6)
    blocks = range(51, 57)
    continue_with(network, wrong, 85, 2, blocks)
    assert not torch.equal(
        drafter_of(network).draft([SECOND], greedy).confidences, expected.confidences
    )
    continue_with(network, ids, 85, 2, blocks)
    assert torch.equal(
        drafter_of(network).draft([SECOND], greedy).confidences, expected.confidences
    )


def test_no_requests_no_drafts(network: Network) -> None:
    made = drafter_of(network).draft([], greedy, 3)
    assert made.ids.shape == (0, 3)
    assert made.confidences.shape == (0, 3)


def test_wrong_calls_are_refused(network: Network) -> None:
    drafter = drafter_of(network)
    for number in (0, drafter.block_size + 1):
        with pytest.raises(ValueError, match=f"num_drafts = {number}: must be 1 to"):
            drafter.draft([FIRST], greedy, number)
    with pytest.raises(ValueError, match="2 ids for 1 requests"):
        drafter.draft([FIRST], lambda _place, _logits: [1, 2])


def test_a_checkpoint_without_blocks_has_no_drafter(rewrite: Callable[..., Path]) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    directory = rewrite(drop)
    document = json.loads((directory / "config.json").read_text())
    text = document["text_config"]
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    text["num_nextn_predict_layers"] = 0
    (directory / "config.json").write_text(json.dumps(document))
    network = load_network(directory, options=NetworkOptions(num_blocks=2, num_slots=2))
    assert network.drafter is None
    span = Span(token_ids=(0, 5), start=0, history=(), slot=1, blocks=(1,), logits=Logits.LAST)
    assert network.forward([span]).shape == (1, network.config.vocab_size)


def test_temperatures_of_the_file_scale_the_confidences(
    network: Network, copy_of_spec_micro: Path
) -> None:
    plain = drafter_of(network).draft([FIRST], greedy)
    factors = [0.5, 1.0, 4.0]
    (copy_of_spec_micro / TEMPERATURES_FILE).write_text(json.dumps({"temperatures": factors}))
    scaled = load_network(copy_of_spec_micro, options=network.options)
    run_tokens(scaled, prompts(golden_folder("v41-spec-micro"))["p20"])
    made = drafter_of(scaled).draft([FIRST], greedy)
    assert torch.equal(made.ids, plain.ids)
    expected = torch.logit(plain.confidences) / torch.tensor(factors)
    torch.testing.assert_close(torch.logit(made.confidences), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[1, 1, 1]",
        "{}",
        '{"temperatures": 1.0}',
        '{"temperatures": [1, 1]}',
        '{"temperatures": [1, 1, 1, 1]}',
        '{"temperatures": [1, 0, 1]}',
        '{"temperatures": [1, -2, 1]}',
        '{"temperatures": [1, "1", 1]}',
        '{"temperatures": [1, true, 1]}',
        '{"temperatures": [1, 1, "1", 1]}',
        '{"temperatures": [1, NaN, 1]}',
        '{"temperatures": [1, Infinity, 1]}',
    ],
)
def test_bad_temperatures_are_refused_by_name(text: str, spec_micro: Path, tmp_path: Path) -> None:
    (tmp_path / TEMPERATURES_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{TEMPERATURES_FILE}: .*delete"):
        draft_temperatures(tmp_path, load_config(spec_micro))


def test_without_a_file_confidences_are_as_trained(spec_micro: Path, tmp_path: Path) -> None:
    assert draft_temperatures(tmp_path, load_config(spec_micro)) == (1.0,) * 3
