"""Whatever happens to an output file, each line of the input ends up in it exactly once."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cluster.batch.journal import Journal, journal_path
from headrace.cluster.batch.lines import BadLine
from headrace.cluster.batch.output import OutputFile, recover, sort_by_line
from headrace.cluster.batch.records import (
    Outcome,
    Timing,
    Usage,
    answer_record,
    error_record,
    read_outcome,
)
from headrace.transfer.errors import ConfigError, HeadraceError

JOB = "0123456789abcdef"


def answer(line: int, text: str = "x") -> bytes:
    return answer_record(
        job_id=JOB,
        line=line,
        custom_id=f"id-{line}",
        body={"choices": [{"text": text}]},
        usage=Usage(3, 4, 7),
        timing=Timing(ttft_s=0.1, total_s=0.4, tpot_s=0.1),
    )[1]


def error(line: int) -> bytes:
    return error_record(JOB, BadLine(line=line, custom_id=None, code="invalid_json", reason="no"))[
        1
    ]


LINES = [answer(2, "a\nb"), error(1), answer(4, "äöü"), answer(3)]
WHOLE = b"".join(LINES)


def recovered(path: Path) -> list[int]:
    """Line numbers kept, in file order, after checking that the file is exactly those lines."""
    kept: list[int] = []

    def accept(outcome: Outcome) -> bool:
        if outcome.line in kept:
            return False
        kept.append(outcome.line)
        return True

    recover(path, accept)
    found = [read_outcome(line) for line in path.read_bytes().splitlines(keepends=True)]
    assert [outcome.line for outcome in found if outcome] == kept
    assert len(found) == len(kept)
    return kept


def test_what_is_written_reads_back():
    assert read_outcome(LINES[0]) == Outcome(
        line=2,
        custom_id="id-2",
        error_code=None,
        usage=Usage(3, 4, 7),
        timing=Timing(ttft_s=0.1, total_s=0.4, tpot_s=0.1),
    )
    assert read_outcome(LINES[1]) == Outcome(line=1, custom_id=None, error_code="invalid_json")
    document = json.loads(LINES[1])
    assert document["response"] is None
    assert document["error"] == {"code": "invalid_json", "message": "line 1: no", "line": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"line": 1}',
        b'{"line":0,"custom_id":null,"response":null,"error":{"code":"x"}}',
    ],
)
def test_other_lines_are_not_ours(data: bytes):
    assert read_outcome(data) is None


def test_cut_at_every_byte_the_whole_lines_stay_and_the_rest_comes_once(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    for size in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:size])
        kept = recovered(path)
        assert kept == [2, 1, 4, 3][: WHOLE[:size].count(b"\n")]
        with path.open("ab") as output:
            output.write(b"".join(answer(line) for line in (1, 2, 3, 4) if line not in kept))
        assert sorted(recovered(path)) == [1, 2, 3, 4]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damage_in_the_middle_costs_only_the_lines_it_touches(tmp_path: Path, data: st.DataObject):
    path = tmp_path / "out.jsonl"
    lines = [LINES[i] for i in data.draw(st.lists(st.integers(0, 3), max_size=8))]
    junk = st.binary(min_size=1, max_size=40).map(lambda piece: piece.replace(b"\n", b"") + b"\n")
    for _ in range(data.draw(st.integers(0, 3))):
        lines.insert(data.draw(st.integers(0, len(lines))), data.draw(junk))
    path.write_bytes(b"".join(lines) + data.draw(st.sampled_from([b"", WHOLE[:50], b"\0\0\0"])))
    expected = dict.fromkeys(outcome.line for line in lines if (outcome := read_outcome(line)))
    assert recovered(path) == list(expected)
    assert recovered(path) == list(expected)


def test_a_missing_output_is_an_empty_one(tmp_path: Path):
    assert recover(tmp_path / "out.jsonl", lambda _: True) == 0


def test_sorting_keeps_every_line_and_can_be_repeated(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join([answer(900), *LINES]))
    for _ in range(2):
        sort_by_line(path)
        assert path.read_bytes() == b"".join([LINES[1], LINES[0], LINES[3], LINES[2], answer(900)])
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_file_that_somebody_changed_is_not_sorted(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINES[0] + b"mine\n")
    with pytest.raises(HeadraceError, match="changed by somebody else"):
        sort_by_line(path)
    assert path.read_bytes() == LINES[0] + b"mine\n"


def test_a_full_disk_is_an_error_of_its_own():
    output = OutputFile(Path("/dev/full"))
    with pytest.raises(HeadraceError, match="No space left"):
        output.append(b"x\n")


def test_a_journal_goes_on_with_the_same_job_only(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    identity = {"input": "a", "size_bytes": 1, "deterministic": True, "keep": None}
    journal = Journal.open(output, identity)
    assert not journal.resumed
    journal.close()
    again = Journal.open(output, identity)
    assert again.resumed
    assert again.job_id == journal.job_id
    again.close()
    with pytest.raises(ConfigError, match=r"size_bytes: 1 then, 2 now.*--output"):
        Journal.open(output, identity | {"size_bytes": 2})


def test_two_drivers_never_write_one_output(tmp_path: Path):
    journal = Journal.open(tmp_path / "out.jsonl", {})
    with pytest.raises(ConfigError, match="another driver"):
        Journal.open(tmp_path / "out.jsonl", {})
    journal.close()
    Journal.open(tmp_path / "out.jsonl", {}).close()


def test_an_output_without_a_journal_is_left_alone(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    with pytest.raises(ConfigError, match="has no journal"):
        Journal.open(output, {})
    assert output.read_text() == "mine\n"
    assert not journal_path(output).exists()


def test_a_journal_torn_at_any_byte_is_begun_anew(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    Journal.open(output, {"a": 1}).close()
    whole = journal_path(output).read_bytes()
    for size in range(0, len(whole), 7):
        journal_path(output).write_bytes(whole[:size])
        journal = Journal.open(output, {"a": 1})
        assert not journal.resumed
        journal.close()
        again = Journal.open(output, {"a": 1})
        assert again.resumed
        again.close()


def test_a_file_of_another_kind_is_no_journal(tmp_path: Path):
    journal_path(tmp_path / "out").write_text(
        '{"headrace_batch": 99, "job_id": "x", "identity": {}}\n'
    )
    with pytest.raises(ConfigError, match="version 99"):
        Journal.open(tmp_path / "out", {})
    journal_path(tmp_path / "out").write_text("shopping list\n")
    with pytest.raises(ConfigError, match="not a journal"):
        Journal.open(tmp_path / "out", {})


def test_a_refused_journal_is_unlocked(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    Journal.open(output, {"a": 1}).close()
    with pytest.raises(ConfigError):
        Journal.open(output, {"a": 2})
    descriptor = os.open(journal_path(output), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
