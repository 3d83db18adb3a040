"""Where the network is cut: decode runs the tails of newcomers inside its steps, and nobody's tokens tell."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from headrace.decode.config import DecodeConfig
from headrace.decode.speculation_config import SpeculationConfig
from headrace.model.batch import Span
from headrace.model.cache import Cache
from headrace.model.config import ModelConfig
from headrace.model.drafter import Drafter
from headrace.model.network import load_network
from headrace.model.network_options import NetworkOptions, Part
from headrace.prefill.config import PrefillConfig
from headrace.tests.fake_network import CHECKPOINT
from headrace.transfer.errors import (
    CorruptBlockError,
    InvalidRequestError,
    LayoutMismatchError,
    TransferError,
)
from headrace.transfer.request import Request

from .conftest import Pair, make_request, plain_loop

KEEP, BLOCK_TOKENS, NUM_SLOTS = 20, 4, 13
NUM_TAILS = 2


@dataclass
class Watched:
    """A real network that notes the spans of every pass."""

    part: Part
    num_blocks: int = 200
    passes: list[list[Span]] = field(default_factory=list[list[Span]])

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        options = NetworkOptions(
            numerics="released",
            block_tokens=BLOCK_TOKENS,
            num_blocks=self.num_blocks,
            num_slots=NUM_SLOTS,
            keep=KEEP,
            part=self.part,
            num_tails=NUM_TAILS if self.part == "decoder" else 0,
        )
        self._network = load_network(CHECKPOINT, options=options)

    @property
    def config(self) -> ModelConfig:
        return self._network.config

    @property
    def cache(self) -> Cache:
        return self._network.cache

    @property
    def drafter(self) -> Drafter | None:
        return self._network.drafter

    def forward(self, spans: Sequence[Span]) -> Tensor:
        self.passes.append(list(spans))
        return self._network.forward(spans)


def seam_pair(decode: DecodeConfig, num_blocks: int = 200) -> tuple[Pair, Watched]:
    encoder, decoder = Watched("encoder"), Watched("decoder", num_blocks)
    networks = iter([encoder, decoder])
    return Pair(lambda: next(networks), PrefillConfig(chunk_tokens=64), decode), decoder


def late_rows(passed: Sequence[Span]) -> int:
    return sum(len(span.token_ids) for span in passed if span.late)


def settings(**changed: object) -> DecodeConfig:
    speculation = SpeculationConfig(schedule="fixed", num_drafts=2)
    config = DecodeConfig(
        overlap=False, speculation=speculation, max_batch=8, tail_tokens=6, num_tails=NUM_TAILS
    )
    return replace(config, **changed)


def prompts(count: int, **sampling: object) -> list[Request]:
    return [
        make_request(f"r{n}", 3 + 17 * n % 60, temperature=0.8 * (n % 2), seed=n, **sampling)
        for n in range(count)
    ]


def expected(requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    whole = Watched("whole")
    return {request.request_id: plain_loop(whole, request) for request in requests}


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_of_the_whole_network(overlap: bool) -> None:
    requests = prompts(12, max_tokens=12)
    pair, decoder = seam_pair(settings(overlap=overlap))
    for request in requests[:3]:
        pair.start(request)
    for request in requests[3:]:
        pair.turn()
        pair.start(request)
    pair.run(2000)
    assert pair.tokens == expected(requests)
    pair.assert_empty()
    assert all(not span.late or span.slot for passed in decoder.passes for span in passed)
    pair.decode.close()


def test_beside_running_requests_a_step_runs_few_rows_of_tails() -> None:
    pair, decoder = seam_pair(settings())
    first = make_request("first", 3, max_tokens=40)
    pair.start(first)
    while "first" not in pair.tokens:
        pair.turn()
    decoder.passes.clear()
    for name in ("a", "b", "c"):
        pair.start(make_request(name, 60))
    while not {"a", "b", "c"} <= pair.tokens.keys():
        pair.turn()
    rows = [late_rows(passed) for passed in decoder.passes]
    assert max(rows) == 6, "the budget is used, and kept"
    assert sum(rows) == 3 * (KEEP - 1)
    waiting = [passed for passed in decoder.passes if late_rows(passed)]
    assert all(any(not span.late for span in passed) for passed in waiting), "first went on"
    pair.run()
    pair.decode.close()


def test_tails_that_keep_nobody_waiting_run_whole() -> None:
    pair, decoder = seam_pair(settings())
    pair.start(make_request("a", 60))
    pair.run()
    assert [late_rows(passed) for passed in decoder.passes][:2] == [KEEP - 1, 0]
    pair.decode.close()


@pytest.mark.parametrize("host_cache_mib", [0, 64])
def test_pressure_in_the_middle_of_a_tail_changes_no_token(host_cache_mib: int) -> None:
    requests = prompts(10, max_tokens=60)
    pair, _ = seam_pair(
        settings(host_cache_mib=host_cache_mib, tail_tokens=1, recompute_tokens=8), num_blocks=44
    )
    for request in requests:
        pair.start(request)
    dropped = 0
    residents = pair.decode._residents
    while len(pair.tokens) < len(requests):
        late = {r.request_id for r in residents.all if r.late_from is not None}
        pair.turn()
        dropped += sum(r.request_id in late for r in residents.all if r.room is None)
    pair.run(3000)
    assert dropped > 0, "nobody was paused in the middle of a tail"
    assert pair.tokens == expected(requests)
    pair.assert_decode_empty()
    pair.decode.close()


def test_a_cancelled_tail_gives_everything_back() -> None:
    pair, decoder = seam_pair(settings(tail_tokens=1))
    pair.start(make_request("first", 3, max_tokens=60))
    while "first" not in pair.tokens:
        pair.turn()
    pair.start(make_request("a", 60))
    while not any(late_rows(passed) for passed in decoder.passes):
        pair.turn()
    for name in ("a", "first"):
        pair.decode.cancel(name)
    pair.run()
    pair.assert_empty()
    assert "a" not in pair.tokens
    pair.decode.close()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tail_checksum": 12345}, CorruptBlockError, r"tail \(our id 0, 19 rows\): checksum"),
        ({"tail": 77}, TransferError, "outside the"),
        ({"tail_start": 3}, TransferError, "begins the decoder layers at token 3; with keep = 20"),
        ({"tail_start": 60}, TransferError, "begins the decoder layers at token 60"),
    ],
)
def test_a_wrong_tail_never_reaches_the_sampler(
    changed: dict[str, int], error: type[TransferError], message: str
) -> None:
    pair, _ = seam_pair(settings())
    pair.start(make_request("a", 60), **changed)
    pair.run()
    assert not pair.tokens
    failure = pair.failures["a"].error
    assert isinstance(failure, error)
    with pytest.raises(error, match=message):
        raise failure
    pair.assert_decode_empty()
    pair.decode.close()


def test_ranks_of_different_splits_refuse_each_other() -> None:
    networks = iter([Watched("whole"), Watched("decoder")])
    with pytest.raises(LayoutMismatchError, match=r"tail_row_bytes: ours \d+, theirs 0.*split"):
        Pair(lambda: next(networks), PrefillConfig(), settings())


def test_prompt_logprobs_need_the_decoder_layers() -> None:
    pair, _ = seam_pair(settings())
    with pytest.raises(
        InvalidRequestError, match="prompt_logprobs = 1, exact = False is not allowed with"
    ):
        pair.prefill.submit(make_request("a", 9, prompt_logprobs=1))
    pair.decode.close()
