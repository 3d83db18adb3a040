"""The network against vectors of an independent reference and of ftllm 1.9.0; bars from the vectors' README.

``plain`` is mathematics only, where two right implementations agree to float noise; ``released`` rounds as the model
was trained, where a last-bit difference may flip a rounding and only quantiles can be asked for.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from .golden import checkpoint_for, cosines, golden_folder, open_golden, prompts, run_tokens

SETS = ("v41-spec-micro", "v41-micro")
MAX_LOGIT_DIFFERENCE = 1e-3
"""Of plain mode; a float64 rerun of the reference moves by 1.1e-5."""
FTLLM_MARGIN = 0.5
"""Logit margin above which ftllm, with its bf16 streams, chooses the same token."""
FLOAT16_STEP = 2e-3
"""Relative: the stored tensors are float16."""


class Recorder:
    """Keeps what a pass observes, chunks joined, under the names of the vectors."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def __call__(self, layer: int, name: str, value: Tensor) -> None:
        self._parts.setdefault(f"layers.{layer}.{name}", []).append(value.clone())

    def __getitem__(self, name: str) -> np.ndarray:
        return torch.cat(self._parts[name]).numpy()

    def __contains__(self, name: str) -> bool:
        return name in self._parts


def as_mask(selected: np.ndarray, columns: int) -> np.ndarray:
    """Selected entries [T, k], -1 for none, as bool [T, columns]."""
    mask = np.zeros((len(selected), columns), dtype=bool)
    for row, entries in enumerate(selected):
        mask[row, entries[entries >= 0]] = True
    return mask


@pytest.mark.parametrize("name", SETS)
def test_plain_logits_equal_the_reference_and_greedy_ids_equal_ftllm(
    name: str, tmp_path: Path
) -> None:
    folder = golden_folder(name)
    network = open_golden(folder, "plain", tmp_path)
    vectors = np.load(folder / "logits_plain.npz")
    for prompt, ids in prompts(folder).items():
        tokens = tuple(int(token) for token in vectors[f"{prompt}_tokens"])
        logits = run_tokens(network, ids + tokens[:-1])[len(ids) - 1 :]
        expected = vectors[f"{prompt}_ref"]
        assert np.abs(logits - expected).max() <= MAX_LOGIT_DIFFERENCE, prompt
        best, second = np.sort(expected, axis=1)[:, :-3:-1].T
        clear = best - second > 2 * MAX_LOGIT_DIFFERENCE
        assert np.array_equal(logits.argmax(axis=1)[clear], expected.argmax(axis=1)[clear]), prompt
        certain = best - second > FTLLM_MARGIN
        assert np.array_equal(logits.argmax(axis=1)[certain], np.array(tokens)[certain]), prompt


@pytest.mark.parametrize("name", SETS)
def test_released_logits_meet_the_quantisation_noise(name: str, tmp_path: Path) -> None:
    folder = golden_folder(name)
    network = open_golden(folder, "released", tmp_path)
    vectors = np.load(folder / "logits_quant.npz")
    agreement: dict[str, list[np.ndarray]] = {"ref": [], "ftllm": []}
    for prompt, ids in prompts(folder).items():
        tokens = tuple(int(token) for token in vectors[f"{prompt}_tokens"])
        logits = run_tokens(network, ids + tokens[:-1])[len(ids) - 1 :]
        for other, found in agreement.items():
            found.append(cosines(logits, vectors[f"{prompt}_{other}"]))
    bars = {"v41-micro": (0.997, 0.993, 0.96), "v41-spec-micro": (0.993, 0.96, 0.85)}[name]
    for other, found in agreement.items():
        cosine = np.concatenate(found)
        measured = (np.median(cosine), np.quantile(cosine, 0.05), cosine.min())
        assert all(value >= bar for value, bar in zip(measured, bars, strict=True)), (
            other,
            measured,
        )


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_plain_chunks_equal_one_pass(chunk: int, tmp_path: Path) -> None:
    folder = golden_folder("v41-spec-micro")
    network = open_golden(folder, "plain", tmp_path, deterministic=False)
    ids = prompts(folder)["p90"]
    difference = np.abs(run_tokens(network, ids, chunk=chunk, slot=2) - run_tokens(network, ids))
    assert difference.max() <= 5e-5


@pytest.mark.parametrize("mode", ["plain", "fp32"])
def test_every_layer_equals_the_reference(mode: str, tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    network = open_golden(folder, "plain" if mode == "plain" else "released", tmp_path)
    seen = Recorder()
    ids = prompts(folder)["p40"]
    run_tokens(network, ids, observe=seen)
    vectors = np.load(folder / f"layers_p40_{mode}.npz")
    compared = 0
    # Another order of sums moves a value that lies between two FP8 values by a whole step, and later layers spread it
    # to later rows: with rounding, rows may leave the bound, but most never do.
    inside = np.ones(len(ids), dtype=bool)
    for key in vectors.files:
        expected = vectors[key]
        if key not in seen:
            continue
        found = seen[key][: len(expected)]
        rows = inside[: len(found)]
        if key.endswith("selected"):
            assert np.array_equal(as_mask(found, expected.shape[1])[rows], expected[rows]), key
        elif key.endswith("expert_ids"):
            assert np.array_equal(np.sort(found, axis=1)[rows], np.sort(expected, axis=1)[rows]), (
                key
            )
        elif key.endswith("expert_weights"):
            far = np.abs(np.sort(found, axis=1) - np.sort(expected, axis=1)) > 1e-4
            assert not far[rows].any(), key
        else:
            bound = FLOAT16_STEP * np.abs(expected).max() + 1e-4
            far = np.abs(found - expected.astype(np.float32)) > bound
            rows &= ~far.reshape(len(found), -1).any(axis=1)
            assert inside.all() or mode == "fp32", key
        compared += 1
    assert compared >= 100
    assert inside.mean() >= 0.5


def test_caches_hold_what_the_reference_stores(tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    vectors = np.load(folder / "layers_p40_fp32.npz")
    network = open_golden(folder, "released", tmp_path, block_tokens=128)
    ids = prompts(folder)["p40"]
    run_tokens(network, ids)
    cache = network.cache
    compared = 0
    for key in vectors.files:
        layer, _, part = key.removeprefix("layers.").partition(".")
        expected = vectors[key].astype(np.float32)
        if part == "cache_main":
            found = cache.format.main.load(cache.main[int(layer)][1])
        elif part == "cache_index":
            found = cache.format.index.load(cache.index[int(layer)][1])
        elif part == "cache_window":
            found = cache.format.window.load(cache.window[int(layer)][1])
        else:
            continue
        equal = (found.numpy()[: len(expected)] == expected).all(axis=-1)
        # The last layer has seen what a single FP8 step of an earlier row does; see above.
        assert equal.mean() >= (0.5 if layer == "11" else 1.0), key
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize("prompt", ["p130", "p300"])
def test_selections_and_routes_equal_the_reference_past_window_and_pool(
    prompt: str, tmp_path: Path
) -> None:
    folder = golden_folder("v41-micro")
    network = open_golden(folder, "plain", tmp_path)
    seen = Recorder()
    run_tokens(network, prompts(folder)[prompt], observe=seen, chunk=77)
    vectors = np.load(folder / "selections_plain.npz")
    compared = 0
    for key in vectors.files:
        owner, _, name = key.partition(".")
        if owner != prompt or name not in seen:
            continue
        expected, found = vectors[key], seen[name]
        if name.endswith("selected"):
            columns = int(vectors[f"{key}.columns"])
            mask = np.unpackbits(expected, axis=1)[:, :columns].astype(bool)
            assert np.array_equal(as_mask(found, columns), mask), key
        elif name.endswith("expert_ids"):
            assert np.array_equal(np.sort(found, axis=1), np.sort(expected, axis=1)), key
        compared += 1
    assert compared >= 16


def test_engram_rows_equal_the_reference(tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    network = open_golden(folder, "plain", tmp_path)
    seen = Recorder()
    run_tokens(network, prompts(folder)["p300"], observe=seen, chunk=64)
    vectors = np.load(folder / "selections_plain.npz")
    for layer in (1, 4):
        expected = vectors[f"p300.layers.{layer}.engram_rows"]
        assert np.array_equal(seen[f"layers.{layer}.engram_rows"], expected)


def test_prompt_rows_equal_the_reference(tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    vectors = np.load(folder / "prompt_logits_top50.npz")
    network = open_golden(folder, "plain", tmp_path)
    for prompt in ("p40", "p130", "p300"):
        logits = run_tokens(network, prompts(folder)[prompt])
        ids = vectors[f"{prompt}_plain_top_ids"].astype(np.int64)
        found = np.take_along_axis(logits, ids, axis=1)
        assert np.abs(found - vectors[f"{prompt}_plain_top_logits"]).max() <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("keep", [128, 140])
def test_decoder_tail_equals_the_reference(keep: int, tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    vectors = np.load(folder / "bounded_replay_plain.npz")
    network = open_golden(folder, "plain", tmp_path, keep=keep)
    for prompt in ("p300", "p700"):
        ids = prompts(folder)[prompt]
        tokens = tuple(int(token) for token in vectors[f"{prompt}_tokens"])
        tail_start = len(ids) - keep
        logits = run_tokens(network, ids + tokens[:-1], tail_start=tail_start, chunk=99)
        expected = vectors[f"{prompt}_ref_tail6_keep{keep}"]
        assert np.abs(logits[keep - 1 :] - expected).max() <= MAX_LOGIT_DIFFERENCE, prompt


def test_image_ids_route_with_their_own_bias_and_block_engram(tmp_path: Path) -> None:
    folder = golden_folder("v41-micro")
    vectors = np.load(folder / "image_mask_plain.npz")
    network = open_golden(folder, "plain", tmp_path)
    ids = tuple(int(token) for token in vectors["ids"])
    logits = run_tokens(network, ids, chunk=9)
    assert np.abs(logits - vectors["ref_bias_vl"]).max() <= MAX_LOGIT_DIFFERENCE


def test_plain_checkpoint_differs_in_the_clamp_only(tmp_path: Path) -> None:
    folder = golden_folder("v41-spec-micro")
    changed = json.loads((checkpoint_for(folder, "plain", tmp_path) / "config.json").read_text())
    original = json.loads((folder / "checkpoint" / "config.json").read_text())
    original["text_config"]["swiglu_limit"] = changed["text_config"]["swiglu_limit"]
    assert changed == original
