"""``headrace eplb show``, the heat map, and what a batch shows and saves of experts."""

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headrace.cluster.batch.fakes import ByteCodec, EchoGenerator
from headrace.cluster.batch.job import BatchJob
from headrace.cluster.batch.progress import status
from headrace.cluster.batch.runner import RunnerConfig
from headrace.cluster.batch.source import Source
from headrace.cluster.batch.target import Target
from headrace.cluster.cli import main
from headrace.cluster.config import load_cluster_config
from headrace.cluster.eplb.heat_map import heat_map, shade_of
from headrace.cluster.eplb.report import load_report, save_report, without_series
from headrace.cluster.eplb.show import balance_line, render_report
from headrace.cluster.eplb.watch import ExpertWatch, shares_experts
from headrace.transfer.errors import ConfigError, RankError

from .reports import LAYERS, FakeReporter, report_of


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


def test_a_report_says_what_was_predicted_achieved_and_moved():
    text = printed(render_report(report_of()))
    assert "16 experts on 4 ranks x 5 slots, epoch 2, rebalancing on" in text
    assert "predicted 0.930 and achieves 0.900" in text
    assert "moved 7 experts, 2.8 MB; 6 layers flipped, 1 plans abandoned" in text
    assert re.search(r"4\.2 .* 11 .* 2 .* moved .* 0\.610 .* 0\.930 .* 0\.900 .* 7 ", text)
    report = report_of()
    report["decode"]["instances"][0] |= {
        "balance": None,
        "predicted_balance": None,
        "achieved_balance": None,
        "history": [],
        "rank_rows": [],
    }
    assert "no rows yet" in printed(render_report(report))
    assert "no pool" in printed(render_report({}))


def test_show_reads_what_a_batch_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    report = report_of()
    save_report(tmp_path / "alone.json", report)
    (tmp_path / "closing.json").write_text(json.dumps({"requests": 3, "eplb": report}))
    for name in ("alone", "closing"):
        assert load_report(tmp_path / f"{name}.json") == report
        capfd.readouterr()
        assert main(["eplb", "show", str(tmp_path / f"{name}.json"), "--json"]) == 0
        assert json.loads(capfd.readouterr().out) == report
    assert main(["eplb", "show", str(tmp_path / "alone.json")]) == 0
    out = capfd.readouterr().out
    assert "decode instance 0" in out
    assert "rank 3" in out
    assert main(["eplb", "show", str(tmp_path / "alone.json"), "--layer", "1"]) == 0
    assert "experts of layer 1" in capfd.readouterr().out
    assert main(["eplb", "show", str(tmp_path / "alone.json"), "--layer", "3"]) == 2
    assert "0 to 2" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"requests": 3, "eplb": 4}', "\x00"])
def test_a_file_that_is_no_report_is_refused(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "r.json").write_text(text)
    assert main(["eplb", "show", str(tmp_path / "r.json")]) == 2
    assert "r.json" in capfd.readouterr().err


def test_a_deployment_shows_how_its_instances_start(capfd: pytest.CaptureFixture[str]):
    arguments = ["eplb", "show", "local", "--set", "decode.experts.redundant=4", "--json"]
    assert main(arguments) == 0
    found = json.loads(capfd.readouterr().out)
    slots = np.array(found["decode"]["placement"])
    assert slots.shape == (8, 2, 10)
    assert np.array(found["decode"]["copies"]).sum(1).tolist() == [20] * 8
    assert np.array(found["prefill"]["placement"]).shape == (8, 1, 16)
    assert main(["eplb", "show", "nowhere"]) == 2


def test_a_closing_report_leaves_out_what_grows():
    short = without_series(report_of(steps=1000))
    (instance,) = short["decode"]["instances"]
    assert "series" not in instance
    assert len(instance["rank_rows"]) == LAYERS
    assert json.loads(json.dumps(short)) == short


def test_a_batch_shows_the_balance_as_it_runs(tmp_path: Path):
    source = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": str(n), "prompt": "abc", "max_tokens": 2}) for n in range(6)]
    source.write_text("\n".join(lines))
    reporter, watch, codec = FakeReporter(), ExpertWatch(interval_s=0.01), ByteCodec()
    watch.begin(reporter)
    output = Target.of(str(tmp_path / "out.jsonl"), tmp_path)
    with BatchJob(Source(str(source)), output, {"model": "fake"}) as job:
        runner = job.runner(
            RunnerConfig(concurrency=1, model="fake"), EchoGenerator(delay_s=0.05), codec
        )
        asyncio.run(job.answer(runner, codec, 1000, watch))
    assert reporter.reports > 3
    assert watch.report == report_of()
    assert balance_line(watch.report) == "balance decode 0.77"
    assert ", balance decode 0.77, " in status(runner, 6, 1.0, watch)
    assert "balance" not in status(runner, 6, 1.0)
    assert "▁ <0.5" in printed(watch.map(20))
    assert watch.map(4) is None


def test_the_last_good_report_stays_when_ranks_have_gone():
    class Gone(FakeReporter):
        def eplb_report(self) -> dict[str, Any]:
            if self.reports:
                raise RankError("decode-0.1 is gone")
            return super().eplb_report()

    watch = ExpertWatch()
    watch.look()
    assert watch.report == {}
    assert watch.line() == ""
    assert watch.map(100) is None
    watch.begin(Gone())
    watch.look()
    watch.look()
    assert watch.report == report_of()


def test_experts_are_watched_where_ranks_share_them():
    assert shares_experts(load_cluster_config("local"))
    alone = load_cluster_config("local", ["decode.ranks=1"])
    assert not shares_experts(alone)


def test_a_report_is_refused_before_a_batch_that_has_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "x", "max_tokens": 1}\n')
    batch = ["batch", "local", "--input", str(tmp_path / "in.jsonl")]
    batch += ["--output", str(tmp_path / "out.jsonl")]
    report = str(tmp_path / "report.json")
    assert main([*batch, "--set", "decode.ranks=1", "--eplb-report", report]) == 2
    assert "no pool of this deployment has ranks > 1" in capfd.readouterr().err
    assert main([*batch, "--eplb-report", str(tmp_path / "none" / "r.json")]) == 2
    assert "which is no folder" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="cannot be written"):
        save_report(tmp_path, report_of())
