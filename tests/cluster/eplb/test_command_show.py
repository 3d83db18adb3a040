"""The heat map, and where a deployment's experts lie at the start."""

import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headrace.cluster.cli import main
from headrace.cluster.eplb.heat_map import heat_map, shade_of


def printed(what: Any, width: int = 120, height: int = 40) -> str:
    text = io.StringIO()
    Console(width=width, height=height, file=text).print(what)
    return text.getvalue()


def test_shades_are_ranges_around_the_mean():
    ratios = [0, 0.49, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 9.0]
    assert [shade_of(ratio) for ratio in ratios] == [0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 7]


def test_a_heat_map_reads_without_colours():
    text = printed(heat_map([[10, 10, 10, 10], [0, 0, 0, 8]], [1.0, 0.25]))
    lines = text.splitlines()
    assert lines[1].split() == ["0", "▄▄▄▄▄▄▄▄", "1.00"]
    assert lines[2].split() == ["1", "▁▁▁▁▁▁██", "0.25"]
    assert lines[3].split()[:2] == ["▁", "<0.5"]


def test_64_ranks_fit_into_a_terminal():
    rows = np.random.default_rng(0).gamma(4.0, size=(40, 64)).tolist()
    lines = printed(heat_map(rows), width=80).splitlines()
    assert len(lines) == 42
    assert all(len(line) <= 80 for line in lines)


def test_a_deployment_shows_how_its_instances_start(capfd: pytest.CaptureFixture[str]):
    arguments = ["eplb", "show", "local", "--set", "decode.experts.redundant=4", "--json"]
    assert main(arguments) == 0
    found = json.loads(capfd.readouterr().out)
    slots = np.array(found["decode"]["placement"])
    assert slots.shape == (8, 2, 10)
    assert np.array(found["decode"]["copies"]).sum(1).tolist() == [20] * 8
    assert np.array(found["prefill"]["placement"]).shape == (8, 1, 16)
    assert main(["eplb", "show", "nowhere"]) == 2
