"""``headrace bench exchange``: one document with a row for each case; wrong sizes are refused by name."""

import json

import pytest

from headrace.cluster.cli import EXIT_USER, main


def test_the_document(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "exchange", "--ranks", "2", "3", "--rows", "0", "5", "--widths", "64"]
    assert main([*command, "--repeats", "1", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    found = [(row["call"], row["ranks"], row["rows"], row["width"]) for row in document["results"]]
    assert found == [
        (call, ranks, rows, width)
        for ranks in (2, 3)
        for call, rows, width in (
            ("gather", None, None),
            ("all_to_all", 0, 64),
            ("all_to_all", 5, 64),
        )
    ]
    assert all(row["gloo_us"] > 0 and row["shared_memory_us"] > 0 for row in document["results"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks 1 is not allowed: 2 to 32"),
        (["--rows", "-1"], "--rows -1 is not allowed"),
        (["--widths", "0"], "--widths 0 is not allowed"),
        (["--repeats", "0"], "--repeats 0 is not allowed"),
        (["--rows", "70000", "--widths", "4096"], "a part has at most 67108864 bytes"),
    ],
)
def test_wrong_sizes(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange", *arguments]) == EXIT_USER
    assert message in capfd.readouterr().err
