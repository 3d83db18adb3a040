"""Sparse attention over window keys and selected entries with one sink per head (spec/model.md 2.5)."""

import math

import numpy as np
import torch
from torch import Tensor

from . import _steps
from ._gemm import multiply
from ._lanes import LANES, exp_16
from ._numba import Scalar, compiled, inner
from .norm import turn_parts
from .reference.storage import FLOAT32


@inner()
def _attend(
    queries: np.ndarray,
    window: np.ndarray,
    window_index: np.ndarray,
    entries: np.ndarray,
    chosen: np.ndarray,
    sink: np.ndarray,
    out: np.ndarray,
) -> None:
    heads, width = queries.shape[1], queries.shape[2]
    most = window_index.shape[1] + chosen.shape[1]
    scale = np.float32(1) / np.float32(math.sqrt(width))
    keys = np.empty((most, width), np.float32)
    across = np.empty((width, heads), np.float32)
    products = np.empty((most, heads), np.float32)
    scores = np.zeros((heads, (most + LANES - 1) // LANES * LANES), np.float32)
    totals, peaks = np.empty(heads, np.float32), np.empty(heads, np.float32)
    for t in range(queries.shape[0]):
        n = 0
        for i in range(window_index.shape[1]):
            place = window_index[t, i]
            if place >= 0:
                for c in range(width):
                    keys[n, c] = window[place, c]
                n += 1
        for i in range(chosen.shape[1]):
            if chosen[t, i] >= 0:
                for c in range(width):
                    keys[n, c] = entries[t, i, c]
                n += 1
        for h in range(heads):
            for c in range(width):
                across[c, h] = queries[t, h, c] * scale
        multiply(keys[:n], 0, across, products, 0, heads)
        for h in range(heads):
            peaks[h] = sink[h]
        for i in range(n):
            for h in range(heads):
                scores[h, i] = products[i, h]
                peaks[h] = max(peaks[h], products[i, h])
        for h in range(heads):
            totals[h] = np.float32(0)
            for i in range(0, n, LANES):
                exp_16(scores, h, i, peaks[h])
        for i in range(n):
            for h in range(heads):
                totals[h] += scores[h, i]
        for h in range(heads):
            totals[h] += np.float32(math.exp(sink[h] - peaks[h]))
        multiply(scores, 0, keys[:n], out[t], 0, width)
        for h in range(heads):
            share = np.float32(1) / totals[h]
            for c in range(width):
                out[t, h, c] *= share


@compiled
def _sink_attention(
    queries: np.ndarray,
    window: np.ndarray,
    window_index: np.ndarray,
    entries: np.ndarray,
    chosen: np.ndarray,
    sink: np.ndarray,
    out: np.ndarray,
) -> None:
    _attend(queries, window, window_index, entries, chosen, sink, out)


@compiled
def _attention_inputs(
    x: np.ndarray,
    latent_panels: np.ndarray,
    latent_norm: np.ndarray,
    down_panels: np.ndarray,
    down_norm: np.ndarray,
    up_panels: np.ndarray,
    turn: np.ndarray,
    eps: Scalar,
    kind: int,
    latent: np.ndarray,
    low: np.ndarray,
    queries: np.ndarray,
) -> None:
    rounded = np.empty(x.shape, np.float32)
    _steps.round_all(x, kind, rounded)
    rows, heads, width = queries.shape
    _steps.product(rounded, latent_panels, width, FLOAT32, latent)
    _steps.rms_norm(latent, latent_norm, eps, latent)
    keys = latent.reshape((rows, 1, width))
    _steps.rotate_last(keys, turn, np.float32(1), keys)
    _steps.product(rounded, down_panels, low.shape[1], FLOAT32, low)
    _steps.rms_norm(low, down_norm, eps, low)
    _steps.round_all(low, kind, low)
    _steps.product(low, up_panels, heads * width, FLOAT32, queries.reshape((rows, heads * width)))
    _steps.rotate_last(queries, turn, np.float32(1), queries)


@compiled
def _attention_output(
    queries: np.ndarray,
    window: np.ndarray,
    window_index: np.ndarray,
    entries: np.ndarray,
    chosen: np.ndarray,
    sink: np.ndarray,
    turn: np.ndarray,
    group_panels: np.ndarray,
    group_outer: int,
    output_panels: np.ndarray,
    kind: int,
    out: np.ndarray,
) -> None:
    rows, heads, width = queries.shape
    mixed = np.empty(queries.shape, np.float32)
    _attend(queries, window, window_index, entries, chosen, sink, mixed)
    _steps.rotate_last(mixed, turn, np.float32(-1), mixed)
    low = np.empty((rows, group_panels.shape[0] * group_outer), np.float32)
    _steps.product(mixed.reshape((rows, heads * width)), group_panels, group_outer, FLOAT32, low)
    _steps.product(low, output_panels, out.shape[1], kind, out)


def sink_attention(
    queries: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: Tensor,
    chosen: Tensor,
    sink: Tensor,
) -> Tensor:
    """One softmax over all keys of a row and the head's sink; a key is also its value.

    ``queries`` [T, h, d]. A row's keys are ``window`` [N, d] at ``window_index`` int64 [T, W] and its own
    ``entries`` [T, k, d] where ``chosen`` int64 [T, k]; a negative index or choice is no key. ``sink`` [h]: [T,
    h, d]. A row without keys gives 0, and what lies behind no key does not matter.
    """
    out = torch.empty_like(queries)
    _sink_attention(
        queries.numpy(),
        window.numpy(),
        window_index.numpy(),
        entries.numpy(),
        chosen.numpy(),
        sink.numpy(),
        out.numpy(),
    )
    return out


def attention_inputs(
    x: Tensor,
    turn: Tensor,
    latent: tuple[np.ndarray, np.ndarray],
    down: tuple[np.ndarray, np.ndarray],
    up: np.ndarray,
    heads: int,
    eps: float,
    kind: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [T, d], the rounded query latent [T, l] and queries [T, ``heads``, d] of ``x`` [T, H], in one call.

    ``latent`` and ``down`` are ``panel_bits`` and the weights of the norm behind them, ``up`` leads from the query
    latent to the queries; inputs of products are rounded as ``kind`` says; ``turn`` [T, r] as of ``rotate_last``.
    """
    rows = x.shape[0]
    keys = torch.empty((rows, latent[1].shape[0]))
    low = torch.empty((rows, down[1].shape[0]))
    queries = torch.empty((rows, heads, keys.shape[1]))
    _attention_inputs(
        x.numpy(),
        *latent,
        *down,
        up,
        turn_parts(turn),
        np.float32(eps),
        kind,
        keys.numpy(),
        low.numpy(),
        queries.numpy(),
    )
    return keys, low, queries


def attention_output(
    queries: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: Tensor,
    chosen: Tensor,
    sink: Tensor,
    turn: Tensor,
    groups: np.ndarray,
    group_outer: int,
    output: np.ndarray,
    hidden: int,
    kind: int,
) -> Tensor:
    """``sink_attention``, turned back by ``turn`` [T, r], through ``groups`` and ``output``, in one call: [T, hidden].

    ``groups`` are ``panel_bits`` of products with ``group_outer`` outputs each; ``output`` takes their results rounded
    as ``kind`` says.
    """
    out = torch.empty((queries.shape[0], hidden))
    _attention_output(
        queries.numpy(),
        window.numpy(),
        window_index.numpy(),
        entries.numpy(),
        chosen.numpy(),
        sink.numpy(),
        turn_parts(turn),
        groups,
        group_outer,
        output,
        kind,
        out.numpy(),
    )
    return out
