"""Prefix hits through real ranks: fewer rows, the same tokens; approximate only where that was asked for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.prefill.hits import PrefixMode
from headrace.tests.pools import Pool, answer, start_pool, stats
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub
from headrace.transfer.request import Request, SamplingParams
from headrace.transfer.tiers.tiers_config import TiersConfig

WINDOW, ENCODER_LAYERS, BLOCK = 32, 4, 16
REACH = ENCODER_LAYERS * (WINDOW - 1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pools(
    mode: PrefixMode,
    *,
    seam: bool = False,
    chunk: int = 256,
    tiers: TiersConfig | None = None,
    num_blocks: int = 400,
) -> tuple[Pool, Pool]:
    hub = LoopbackHub()

    def backend(name: str, arenas: object) -> LoopbackBackend:
        return LoopbackBackend(hub, name, arenas)  # type: ignore[arg-type]

    common = {"seam": seam, "prefix_cache": mode, "block_tokens": BLOCK, "tiers": tiers}
    prefill = start_pool("prefill", 1, chunk, backend, num_blocks=num_blocks, **common)
    decode = start_pool("decode", 1, chunk, backend, num_blocks=400, **common)
    decode.connect(prefill)
    prefill.connect(decode)
    return prefill, decode


def chat(turns: int, seed: int = 0) -> list[tuple[int, ...]]:
    """User's parts of a conversation: a long one, then short ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [400, *(5 + 11 * turn % 40 for turn in range(turns - 1))]
    return [
        tuple(torch.randint(3, 4000, (length,), generator=generator).tolist()) for length in lengths
    ]


def converse(pair: tuple[Pool, Pool], turns: int, name: str = "chat") -> list[tuple[int, ...]]:
    """The answers of a conversation whose every turn repeats all that was said."""
    said: tuple[int, ...] = (0,)
    answers: list[tuple[int, ...]] = []
    for turn, words in enumerate(chat(turns)):
        said += words
        request = Request(
            request_id=f"{name}{turn}",
            prompt_ids=said,
            sampling=SamplingParams(max_tokens=6, temperature=0.7, seed=turn, ignore_eos=True),
        )
        answers.append(answer(*pair, [request])[request.request_id])
        said += answers[-1]
    return answers


def stop(pair: tuple[Pool, Pool]) -> dict[str, int]:
    (counted,) = stats(pair[0])
    for pool in reversed(pair):
        pool.stop()
    return counted


@pytest.mark.parametrize("seam", [False, True])
def test_exact_hits_give_the_tokens_of_no_cache_with_a_bounded_number_of_rows(seam: bool) -> None:
    turns = 20
    plain, cached = pools("off", seam=seam), pools("exact", seam=seam)
    expected = converse(plain, turns)
    assert converse(cached, turns) == expected
    without, counted = stop(plain), stop(cached)
    assert without["hit_tokens"] == without["replayed_rows"] == 0
    assert counted["rows"] == without["rows"] - counted["hit_tokens"] + counted["replayed_rows"]
    keep = WINDOW + 12
    assert counted["replayed_rows"] <= (turns - 1) * (REACH + keep + 1)
    assert counted["rows"] < 0.4 * without["rows"]


def test_a_chat_of_twenty_turns_computes_its_new_tokens_and_one_window_a_turn() -> None:
    turns = 20
    pair = pools("window")
    converse(pair, turns)
    counted = stop(pair)
    assert counted["replayed_rows"] == (turns - 1) * WINDOW
    new = counted["prompt_tokens"] - turns - counted["hit_tokens"]
    assert counted["rows"] == new + (turns - 1) * WINDOW
    said = sum(len(words) for words in chat(turns)) + 6 * turns + 1
    assert new < said + turns * BLOCK, "a turn computes what is new, and the last partial block"


def test_a_new_deployment_finds_on_disk_what_an_old_one_computed_and_answered(
    tmp_path: Path,
) -> None:
    turns, disk = 4, TiersConfig(disk=str(tmp_path / "blocks"))
    plain = pools("off")
    expected = converse(plain, turns)
    stop(plain)
    first = pools("exact", tiers=disk)
    assert converse(first, turns) == expected
    assert stop(first)["loaded_blocks"] < turns * 3, "of its own prompts the device had nearly all"
    second = pools("exact", tiers=disk)
    assert converse(second, turns) == expected
    counted = stop(second)
    assert counted["loaded_blocks"] > 400 // BLOCK
    assert counted["hit_tokens"] >= counted["prompt_tokens"] - turns * (BLOCK + 1)


def test_a_device_too_small_for_its_prompts_gets_them_back_from_memory(tmp_path: Path) -> None:
    (words,) = chat(1)
    others = [tuple(reversed(words)), words[7:] + words[:7]]
    pair = pools("exact", tiers=TiersConfig(memory_mib=64), num_blocks=40)
    expected: dict[int, tuple[int, ...]] = {}
    for number, prompt in enumerate([words, *others, words, *others]):
        request = Request(
            request_id=f"r{number}",
            prompt_ids=(0, *prompt),
            sampling=SamplingParams(max_tokens=3, ignore_eos=True),
        )
        ids = answer(*pair, [request])[request.request_id]
        assert ids == expected.setdefault(number % 3, ids)
    counted = stop(pair)
    assert counted["evicted_blocks"] > 0
    assert counted["loaded_blocks"] > 50


@pytest.mark.parametrize("how", ["torn", "flipped", "gone"])
def test_a_broken_store_is_a_miss_and_never_a_wrong_answer(how: str, tmp_path: Path) -> None:
    disk = TiersConfig(disk=str(tmp_path))
    first = pools("exact", tiers=disk)
    expected = converse(first, 2)
    stop(first)
    records = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 999]
    assert len(records) > 20
    for path in records:
        data = bytearray(path.read_bytes())
        if how == "flipped":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif how == "torn":
            path.write_bytes(data[: len(data) // 2])
        else:
            path.unlink()
    second = pools("exact", tiers=disk)
    assert converse(second, 2) == expected
    assert stop(second)["loaded_blocks"] == 0


def test_identical_cold_prompts_are_prefilled_once() -> None:
    pair = pools("exact")
    (words,) = chat(1)
    asked = [
        Request(
            request_id=f"r{n}",
            prompt_ids=(0, *words, 7),
            sampling=SamplingParams(max_tokens=3, temperature=0.9, seed=n, ignore_eos=True),
        )
        for n in range(16)
    ]
    together = answer(*pair, asked)
    counted = stop(pair)
    alone = pools("off")
    assert together == answer(*alone, asked)
    stop(alone)
    length = len(asked[0].prompt_ids) - 1
    hit = length // BLOCK * BLOCK
    assert counted["hit_tokens"] == 15 * hit
    assert counted["rows"] == length + 15 * (length - hit) + counted["replayed_rows"]


def test_who_waits_for_a_prompt_that_is_cancelled_computes_it() -> None:
    pair = pools("exact", chunk=32)
    (words,) = chat(1)
    first, second = (
        Request(request_id=name, prompt_ids=(0, *words), sampling=SamplingParams(max_tokens=2))
        for name in ("first", "second")
    )
    (loop,) = pair[0].loops
    loop.submit_many([(first,)])
    loop.cancel(["first"])
    assert len(answer(*pair, [second])["second"]) == 2
    stop(pair)


@pytest.mark.parametrize("mode", ["window", "exact"])
def test_an_exact_request_takes_nothing_approximate_and_tenants_share_nothing(
    mode: PrefixMode,
) -> None:
    pair = pools(mode)
    (words,) = chat(1)
    base = Request(request_id="a", prompt_ids=(0, *words), sampling=SamplingParams(max_tokens=2))
    for request in (
        base,
        replace(base, request_id="b", cache_salt="tenant"),
        replace(base, request_id="c", exact=True),
    ):
        answer(*pair, [request])
    (before,) = stats(pair[0])
    expected_hits = 0 if mode == "window" else len(words) // BLOCK * BLOCK
    assert before["hit_tokens"] == expected_hits
    assert before["replayed_rows"] == expected_hits, "an exact request runs all its rows"
    answer(*pair, [replace(base, request_id="d", cache_salt="tenant")])
    (after,) = stats(pair[0])
    assert after["hit_tokens"] > before["hit_tokens"]
    stop(pair)
