"""Primes, multipliers and token map against the vectors of spec model.md section 13 and of the golden checkpoint."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.model.config import config_from_dict, load_config
from headrace.model.engram_tables import (
    compressed_token_map,
    engram_multipliers,
    engram_primes,
    engram_tables,
)


def test_primes_of_the_released_model_sum_to_its_table_rows() -> None:
    layers = engram_primes(num_layers=2, start=16_000_000, num_columns=24)
    assert [sum(primes) for primes in layers] == [384006168, 384016682]
    assert layers[0][:3] == (16000057, 16000079, 16000081)
    assert layers[1][-1] == 16000889


def test_multipliers_of_the_released_model() -> None:
    assert engram_multipliers(1, 99092, 4) == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert engram_multipliers(14, 99092, 4) == (
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    )


def test_golden_constants(micro: Path) -> None:
    golden = json.loads((micro.parent / "engram.json").read_text())
    config = load_config(micro)
    tables = engram_tables(config)
    assert sorted(tables) == [1, 4]
    for layer, table in tables.items():
        assert list(table.primes) == golden["primes"][str(layer)]
        assert list(table.offsets) == golden["offsets"][str(layer)]
        assert [str(value) for value in table.multipliers] == golden["multipliers"][str(layer)]
    backend = Tokenizer.from_file(str(micro / "tokenizer.json"))
    assert list(compressed_token_map(backend)) == golden["token_map"]


def test_rows_of_the_released_model(released: dict[str, Any]) -> None:
    tables = engram_tables(config_from_dict(released))
    ids = (13, 11, 7, 5)  # compressed: own token, then predecessors, nearest first
    for layer, first, last in ((1, 4449004, 369904649), (14, 15143247, 378459855)):
        table = tables[layer]
        state, rows = ids[0] * table.multipliers[0], []
        for place in range(1, 4):
            state ^= ids[place] * table.multipliers[place]
            columns = range((place - 1) * 8, place * 8)
            rows += [state % table.primes[column] + table.offsets[column] for column in columns]
        assert (rows[0], rows[-1]) == (first, last)
