"""``headrace bench eplb`` and the loads it reads."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.cluster.cli import main
from headrace.cluster.eplb.loads import counts_from_csv
from headrace.transfer.errors import ConfigError


def test_one_line_a_load_and_plan_in_one_document(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).poisson(9.0, (20, 2, 16))
    np.savez(tmp_path / "load.npz", rows=rows)
    arguments = ["bench", "eplb", "--load", str(tmp_path / "load.npz"), "--ranks", "4"]
    assert main([*arguments, "--slots", "5", "--deadline", "0.2", "--json"]) == 0
    lines = json.loads(capfd.readouterr().out)
    assert [line["plan"] for line in lines] == [
        "none",
        "deepseek",
        "deepinfer",
        "ours",
        "ours from present",
    ]
    ours = lines[3]
    assert 1.0 <= ours["bound"] <= ours["peak_over_mean"] < lines[1]["peak_over_mean"]
    assert lines[4]["bytes_moved"] < ours["bytes_moved"]


def test_a_file_that_is_no_load_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    assert main(["bench", "eplb", "--load", str(tmp_path / "bad.npz"), "--json"]) == 2
    assert "bad.npz" in capfd.readouterr().err


def test_counts_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "counts.csv"
    table.write_text("batch,layer,e0,e1\n0,1,3,4\n0,2,5,6\n1,1,7,8\n1,2,9,1\n")
    assert counts_from_csv(table).tolist() == [[[3, 4], [5, 6]], [[7, 8], [9, 1]]]
    table.write_text("batch,layer,e0,e1\n0,1,3,4\n0,2,5,6\n1,1,7,8\n")
    with pytest.raises(ConfigError, match="may lack a layer"):
        counts_from_csv(table)
    table.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"counts\.csv is not a table of counts"):
        counts_from_csv(table)
