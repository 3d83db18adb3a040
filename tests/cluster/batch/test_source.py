"""Inputs of every kind, read line by line."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from headrace.cluster.batch.source import (
    MAX_LINE_BYTES,
    RawLine,
    Row,
    Source,
    Unreadable,
    split_lines,
)
from headrace.transfer.errors import ConfigError


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def numbered(source: Source) -> list[tuple[int, bytes]]:
    return [(line.number, line.data) for line in source.lines() if isinstance(line, RawLine)]


def test_bom_crlf_blank_lines_and_a_last_line_without_end(tmp_path: Path):
    source = Source(
        write(tmp_path / "in.jsonl", b'\xef\xbb\xbf{"a":1}\r\n\r\n  \n{"b":2}\n{"c":3}')
    )
    assert numbered(source) == [(1, b'{"a":1}'), (4, b'{"b":2}'), (5, b'{"c":3}')]
    assert source.num_lines == 5


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_input_without_a_line_is_refused(tmp_path: Path, data: bytes):
    with pytest.raises(ConfigError, match="holds no line"):
        Source(write(tmp_path / "in.jsonl", data))


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        Source(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(ConfigError, match="is a directory"):
        Source(str(tmp_path))
    with pytest.raises(ConfigError, match="no address"):
        Source("gopher://host/file")
    with pytest.raises(ConfigError, match="begins like Parquet"):
        Source(write(tmp_path / "x.parquet", b"PAR1 and nothing more"))


def test_compressed_inputs_are_unpacked_by_their_ending(tmp_path: Path):
    data = b'{"a":1}\n{"b":2}\n'
    zipped = Source(write(tmp_path / "in.jsonl.gz", gzip.compress(data)))
    assert numbered(zipped) == [(1, b'{"a":1}'), (2, b'{"b":2}')]
    assert zipped.num_lines is None
    with pa.CompressedOutputStream(str(tmp_path / "in.jsonl.zst"), "zstd") as stream:
        stream.write(data)
    assert len(numbered(Source(str(tmp_path / "in.jsonl.zst")))) == 2


def test_a_damaged_compressed_input_is_an_error_not_a_crash(tmp_path: Path):
    whole = gzip.compress(b"".join(b'{"a":%d}\n' % i for i in range(300_000)))
    source = Source(write(tmp_path / "in.jsonl.gz", whole[: len(whole) // 2] + b"\0" * 1000))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(source.lines())


def test_a_file_uri_is_the_same_file(tmp_path: Path):
    path = write(tmp_path / "in.jsonl", b'{"a":1}\n')
    assert Source(f"file://{path}").identity == Source(path).identity


def test_the_identity_is_the_content_not_the_name_or_the_time(tmp_path: Path):
    one = Source(write(tmp_path / "one", b'{"a":1}\n'))
    assert Source(write(tmp_path / "two", b'{"a":1}\n')).identity == one.identity
    assert Source(write(tmp_path / "three", b'{"a":2}\n')).identity != one.identity


def test_parquet_rows_without_their_nulls(tmp_path: Path):
    rows = [
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "seed": None}},
        {"custom_id": "b", "url": None, "body": {"prompt": "y", "seed": 3}},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    source = Source(str(tmp_path / "in.parquet"))
    assert source.num_lines == 2
    assert list(source.lines()) == [
        Row(1, {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}),
        Row(2, {"custom_id": "b", "body": {"prompt": "y", "seed": 3}}),
    ]


def test_a_parquet_row_that_is_not_utf8_is_one_bad_row(tmp_path: Path):
    texts = pa.StringArray.from_buffers(
        2, pa.array([0, 2, 4], pa.int32()).buffers()[1], pa.py_buffer(b"ok\xff\xfe")
    )
    table = pa.Table.from_arrays([pa.array(["1", "2"]), texts], names=["id", "prompt"])
    parquet.write_table(table, tmp_path / "in.parquet")
    first, second = Source(str(tmp_path / "in.parquet")).lines()
    assert first == Row(1, {"id": "1", "prompt": "ok"})
    assert isinstance(second, Unreadable)
    assert (second.number, second.code) == (2, "invalid_row")


def test_an_empty_parquet_file_is_refused(tmp_path: Path):
    parquet.write_table(pa.table({"id": pa.array([], pa.string())}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="holds no line"):
        Source(str(tmp_path / "in.parquet"))


def test_a_very_long_line_is_skipped_without_being_held():
    chunk = b"x" * (1 << 20)

    def stream():
        yield b'{"a":1}\n'
        for _ in range(200):
            yield chunk
        yield b'\n{"b":2}\n'

    first, second, third = split_lines(stream())
    assert (first, third) == (RawLine(1, b'{"a":1}'), RawLine(3, b'{"b":2}'))
    assert isinstance(second, Unreadable)
    assert (second.number, second.code) == (2, "line_too_long")
    assert str(200 << 20) in second.reason
    assert str(MAX_LINE_BYTES) in second.reason


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_lines_do_not_depend_on_how_the_stream_is_cut(chunks: list[bytes]):
    whole = b"".join(chunks)
    assert list(split_lines(iter(chunks), 20)) == list(split_lines(iter([whole]), 20))
    numbers = [line.number for line in split_lines(iter(chunks), 20)]
    assert numbers == sorted(set(numbers))


def test_json_round_trip_of_a_line_near_the_limit():
    line = json.dumps({"id": "a", "prompt": "x" * 100}).encode()
    assert list(split_lines(iter([line[:50], line[50:] + b"\n"]), len(line))) == [RawLine(1, line)]
    (over,) = split_lines(iter([line[:50], line[50:] + b"\n"]), len(line) - 1)
    assert isinstance(over, Unreadable)
