"""Both ranks around the real network: a handoff must change nothing at all."""

from collections.abc import Callable

import pytest

from headrace.decode.config import DecodeConfig
from headrace.model.network import Network, load_network
from headrace.model.network_options import NetworkOptions
from headrace.prefill.config import PrefillConfig
from headrace.tests.fake_network import CHECKPOINT

from .conftest import Pair, make_request, plain_loop


def loader(numerics: str, keep: int | None = None) -> Callable[[], Network]:
    options = NetworkOptions(
        numerics=numerics, block_tokens=16, num_blocks=24, num_slots=8, keep=keep
    )
    return lambda: load_network(CHECKPOINT, options=options)


@pytest.mark.parametrize("numerics", ["released", "plain"])
@pytest.mark.parametrize("chunk", [7, 33, 500])
def test_tokens_equal_those_of_one_process(numerics: str, chunk: int) -> None:
    """Prompt lengths around block, window (8) and keep (20); chunks cut pairs, windows and blocks."""
    load = loader(numerics)
    pair = Pair(load, PrefillConfig(chunk_tokens=chunk), DecodeConfig(max_batch=8))
    lengths = (1, 2, 17, 22, 33, 70)
    requests = [
        make_request(
            f"r{length}", length, max_tokens=6, temperature=0.7 * (length % 2), top_logprobs=2
        )
        for length in lengths
    ]
    for request in requests:
        pair.start(request)
    pair.run()
    one_process = load()
    for request in requests:
        assert pair.tokens[request.request_id] == plain_loop(one_process, request)
    pair.assert_empty()


def test_exact_prefill_of_every_row() -> None:
    load = loader("released", keep=1000)
    pair = Pair(load, PrefillConfig(chunk_tokens=11))
    request = make_request("a", 50, max_tokens=6)
    pair.start(request)
    pair.run()
    assert pair.tokens["a"] == plain_loop(load(), request)
    assert pair.prefill_network.cache.layout.keep == 1000
    pair.assert_empty()


def test_idle_ranks_step_with_zero_rows() -> None:
    pair = Pair(loader("released"))
    assert pair.decode.step() == []
    assert pair.prefill.step() == []
