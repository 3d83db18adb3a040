"""Statistics that outlive a deployment."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.cluster.eplb.config import EplbConfig
from headrace.cluster.eplb.history import TrafficHistory
from headrace.transfer.errors import ConfigError

from .reports import EXPERTS, LAYERS, rows_of


def history_of(folder: Path, traffic_class: str = "chat", pool: str = "decode") -> TrafficHistory:
    return TrafficHistory(EplbConfig(history=str(folder), traffic_class=traffic_class), pool)


def test_what_is_saved_is_found_by_class_and_pool(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "history"
    history_of(folder).save(rows_of(30))
    found = history_of(folder).load(LAYERS, EXPERTS)
    assert found is not None and (found == rows_of(30)).all()
    assert history_of(folder, "code").load(LAYERS, EXPERTS) is None
    assert history_of(folder, pool="prefill").load(LAYERS, EXPERTS) is None
    assert [path.name for path in folder.iterdir()] == ["chat.decode.npz"]


def test_writers_do_not_disturb_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop's last save may be under way when the actor saves at its end."""
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(6) as threads:
        list(threads.map(history_of(tmp_path).save, [rows_of(400)] * 6))
    assert not caplog.records
    found = history_of(tmp_path).load(LAYERS, EXPERTS)
    assert found is not None and (found == rows_of(400)).all()
    assert [path.name for path in tmp_path.iterdir()] == ["chat.decode.npz"]


def test_nothing_seen_keeps_what_is_there(tmp_path: Path) -> None:
    history_of(tmp_path).save(rows_of(30))
    history_of(tmp_path).save(np.zeros((0, LAYERS, EXPERTS), np.int32))
    assert history_of(tmp_path).load(LAYERS, EXPERTS) is not None


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 torn", None])
def test_a_file_that_does_not_fit_is_said_and_not_used(
    data: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = history_of(tmp_path)
    history.save(rows_of(30))
    if data is not None:
        (tmp_path / "chat.decode.npz").write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert history.load(LAYERS, EXPERTS + 1) is None
    assert "no warm start" in caplog.text and "chat.decode.npz" in caplog.text


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        history_of(tmp_path / "file").save(rows_of(30))
    assert "were not saved" in caplog.text


def test_without_a_folder_nothing_happens() -> None:
    history = TrafficHistory(EplbConfig(), "decode")
    history.save(rows_of(3))
    assert history.load(LAYERS, EXPERTS) is None


@pytest.mark.parametrize("name", ["a/b", "", "..", ".x", "a" * 101])
def test_a_class_names_a_file(name: str) -> None:
    with pytest.raises(ConfigError, match="traffic_class = "):
        EplbConfig(history="x", traffic_class=name)
