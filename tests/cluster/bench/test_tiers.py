import json
from pathlib import Path

import pytest

from headrace.cluster.cli import main


def test_every_tier_is_measured_and_nothing_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--folder", str(tmp_path), "--blocks", "3", "--repeats", "2", "--json"]
    assert main(["bench", "tiers", *arguments]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {row["what"] for row in found["results"]} == {
        "memory store",
        "memory load",
        "disk store",
        *(f"disk load {state}, {io}" for state in ("hot", "cold") for io in ("plain", "nixl")),
        "loop: store",
        "loop: find",
        "loop: start a load",
    }
    assert all(row["mb_per_s"] > 0 for row in found["results"])
    assert found["bytes_per_token"] == {"payload": 890, "header": 0.8125, "on_disk": 896}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--blocks", "--repeats"])
def test_numbers_below_one_are_refused(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tiers", option, "0"]) == 2
    assert f"{option} = 0 is not allowed: at least 1" in capfd.readouterr().err
