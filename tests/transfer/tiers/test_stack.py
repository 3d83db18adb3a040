from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from headrace.tests.transfer.layouts import SMALL
from headrace.tests.transfer.tiers.stored import DIGEST, key_of, payload_of, rows_of, until
from headrace.transfer.errors import ConfigError
from headrace.transfer.tiers.disk import DiskStore
from headrace.transfer.tiers.eviction import make_policy
from headrace.transfer.tiers.memory import MemoryStore
from headrace.transfer.tiers.open import open_tiers
from headrace.transfer.tiers.rates import Rates
from headrace.transfer.tiers.record import Kind
from headrace.transfer.tiers.stack import Span, StackLoad, TierStack
from headrace.transfer.tiers.tier import Tier
from headrace.transfer.tiers.tiers_config import TiersConfig

PROMPT = range(6)


class Stack:
    """Memory of 4 blocks over a disk, and how to talk to them."""

    def __init__(self, path: Path, memory_blocks: int = 4) -> None:
        memory = MemoryStore(
            layout_digest=DIGEST,
            capacity_bytes=memory_blocks * SMALL.block_bytes,
            row_bytes=SMALL.block_bytes,
            policy=make_policy("lru"),
        )
        disk = DiskStore(path, layout=SMALL, capacity_bytes=1 << 30, policy=make_policy("lru"))
        self.now = 0.0
        self.rates = Rates(retry_s=30, clock=lambda: self.now)
        self.stack = TierStack([Tier("memory", memory), Tier("disk", disk)], SMALL, self.rates)

    def store(self, *numbers: int) -> None:
        row = torch.empty(SMALL.block_bytes, dtype=torch.uint8)
        for number in numbers:
            row.copy_(torch.frombuffer(bytearray(payload_of(number)), dtype=torch.uint8))
            self.stack.store(key_of(number), row, parent=key_of(number - 1))
        row.zero_()  # what was stored is a copy
        assert self.stack.flush(10)

    def find(self) -> list[Span]:
        return self.stack.find([key_of(number) for number in PROMPT])

    def load(self, spans: list[Span]) -> tuple[StackLoad, torch.Tensor]:
        rows = rows_of(len(PROMPT))
        load = self.stack.load(spans, [key_of(number) for number in PROMPT], list(rows))
        until(load.poll)
        until(load.quiet)
        return load, rows

    def close(self) -> None:
        self.stack.close()


@pytest.fixture
def opened() -> Generator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def stack(tmp_path: Path, opened: ExitStack) -> Stack:
    found = Stack(tmp_path / "cache")
    opened.callback(found.close)
    return found


def test_a_prompt_is_gathered_from_all_tiers(stack: Stack) -> None:
    stack.store(0, 1, 4, 2, 3, 5)
    assert stack.find() == [Span("disk", 2), Span("memory", 4)]
    load, rows = stack.load(stack.find())
    assert load.num_leading == 6
    for number in PROMPT:
        assert rows[number].numpy().tobytes() == payload_of(number)


def test_the_chain_ends_at_the_first_block_that_nobody_has(stack: Stack) -> None:
    stack.store(0, 1, 3, 5)
    assert stack.find() == [Span("memory", 2)]
    assert stack.stack.find([]) == []
    assert stack.stack.find([key_of(99)]) == []


def test_a_hit_on_disk_is_kept_in_memory(tmp_path: Path, opened: ExitStack) -> None:
    before = Stack(tmp_path)
    before.store(*PROMPT)
    before.close()
    after = Stack(tmp_path)
    opened.callback(after.close)
    assert after.find() == [Span("disk", 6)]
    load, _ = after.load([Span("disk", 3)])
    assert load.num_leading == 3
    assert after.stack.flush(10)
    assert after.find() == [Span("memory", 3), Span("disk", 3)]
    load, rows = after.load(after.find())
    assert load.num_leading == 6
    assert rows[2].numpy().tobytes() == payload_of(2)


def test_what_is_broken_ends_the_hit(tmp_path: Path, stack: Stack) -> None:
    stack.store(*PROMPT)
    name = bytes((Kind.BLOCK,)) + key_of(1)
    file = tmp_path / "cache" / "records" / f"{name[1]:02x}" / name.hex()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert stack.find() == [Span("disk", 2), Span("memory", 4)]
    load, rows = stack.load(stack.find())
    assert load.num_leading == 1
    assert rows[0].numpy().tobytes() == payload_of(0)
    assert stack.find() == [Span("disk", 1)] or stack.find() == [Span("memory", 1)]
    stack.store(1)
    assert sum(span.num_blocks for span in stack.find()) >= 2  # computed anew, stored anew


def test_nothing_is_stored_twice(stack: Stack) -> None:
    stack.store(1)
    row = torch.zeros(SMALL.block_bytes, dtype=torch.uint8)
    assert stack.stack.store(key_of(1), row) == 0
    assert stack.stack.stats()["disk"].num_stored == 1


def test_a_slow_tier_is_left_out_until_it_is_tried_again(stack: Stack) -> None:
    stack.store(*PROMPT)
    assert stack.find() == [Span("disk", 2), Span("memory", 4)]
    stack.rates.note_load("disk", 100, 1.0)
    stack.rates.note_prefill(SMALL.block_tokens, 1e-4)
    assert stack.find() == []  # its blocks are the first of the chain
    stack.now = 31.0
    assert stack.find() == [Span("disk", 2), Span("memory", 4)]
    stack.load(stack.find())
    assert set(stack.rates.load_s_per_byte) == {"disk", "memory"}


def test_windows_are_records_of_their_own(stack: Stack) -> None:
    windows = torch.arange(200, dtype=torch.uint8)
    assert stack.stack.find_windows(key_of(3)) is None
    assert stack.stack.store(key_of(3), windows, kind=Kind.WINDOWS) == 2
    assert stack.stack.flush(10)
    assert stack.stack.find_windows(key_of(3)) == "memory"
    assert stack.stack.find([key_of(3)]) == []
    for tier in ("memory", "disk"):
        row = torch.zeros(200, dtype=torch.uint8)
        load = stack.stack.load_windows(tier, key_of(3), row)
        until(load.poll)
        assert load.num_leading == 1 and torch.equal(row, windows)


def test_an_abandoned_load_counts_for_nothing(stack: Stack) -> None:
    stack.store(0)
    rows = rows_of(1)
    load = stack.stack.load([Span("memory", 1)], [key_of(0)], list(rows))
    load.abandon()
    assert load.poll()
    until(load.quiet)
    assert stack.rates.load_s_per_byte == {}


def test_a_deployment_opens_its_tiers(tmp_path: Path) -> None:
    stack = open_tiers(TiersConfig(memory_mib=1, disk=str(tmp_path / "kv"), disk_gib=0.5), SMALL)
    assert list(stack.stats()) == ["memory", "disk"]
    stack.close()
    with pytest.raises(ConfigError, match="holds other files"):
        (tmp_path / "else").write_text("")
        open_tiers(TiersConfig(disk=str(tmp_path)), SMALL)
    assert open_tiers(TiersConfig(), SMALL).find([key_of(0)]) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory_mib", -1, "memory_mib = -1 is not allowed: an integer of at least 0"),
        ("write_queue_mib", 0, "write_queue_mib = 0 is not allowed: an integer of at least 1"),
        ("disk_gib", 0.0, "disk_gib = 0 is not allowed: a number above 0"),
        ("load_timeout_s", float("nan"), "load_timeout_s = nan is not allowed"),
        ("disk_io", "mmap", "disk_io = 'mmap' is not allowed: one of plain, nixl"),
        ("policy", "fifo", "policy = 'fifo' is not allowed: one of"),
        ("disk", " ", "disk = ' ' is not allowed: null, or a folder"),
        ("objects", "gs://x", "object store 'gs://x' is not allowed: s3://bucket/prefix"),
    ],
)
def test_values_that_make_no_sense_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TiersConfig(**{key: value})  # pyright: ignore[reportArgumentType]
