"""Choosing tokens from logits, each row by itself, and the same whoever asks and whenever.

A row's token depends on its logits, its SamplingParams, the tokens before it and its position, never on the other
rows, the rank or the time. In order:

    bias | repetition, presence, frequency penalties | grammar, min_tokens | temperature | top-p, top-k, min-p | draw

The noise of the draw belongs to (seed, position, token id). So a draft that was drawn from other logits with the same
noise agrees with the token as often as the two distributions do, and accepting exactly those drafts that agree changes
no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.logprobs import token_logprobs
from ..kernels.penalties import adjust
from ..kernels.reference.penalties import Adjustment
from ..kernels.reference.sample import Choices, Ints
from ..kernels.sample import draw
from ..transfer.request import SamplingParams, TopLogprobs

GREEDY_BELOW = 1e-5  # temperatures under this are greedy (spec engine.md section 7)
_PROMPTS_KEPT = 256

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Consecutive rows of one request: after ``output_ids``, and after each of ``drafts``, which may turn out wrong.

    ``mask`` is uint32 [rows, ceil(V / 32)]: bit x % 32 of word x / 32 allows id x; None allows all. With ``last_only``
    there is one row, after all drafts.
    """

    params: SamplingParams
    prompt_ids: tuple[int, ...]
    output_ids: Sequence[int]
    drafts: Sequence[int] = ()
    mask: Words | None = None
    last_only: bool = False

    @property
    def num_rows(self) -> int:
        """How many tokens are sampled."""
        return 1 if self.last_only else 1 + len(self.drafts)

    @property
    def num_before(self) -> int:
        """Tokens of the answer before the first row's."""
        return len(self.output_ids) + (len(self.drafts) if self.last_only else 0)


def sample(logits: Tensor, wanted: Sequence[SampledRows], eos_id: int) -> Ints:
    """Token ids, int64 [B], for ``logits`` (fp32 [B, V]), the rows of ``wanted`` one behind the other.

    -1 where logits are not finite or nothing is allowed.
    """
    vocabulary = logits.shape[1]
    params = [rows.params for rows in wanted]
    num_rows = np.array([rows.num_rows for rows in wanted], np.int64)
    assert num_rows.sum() == len(logits), "logits and wanted differ in their number of rows"
    replaced_at, replaced = _replaced(logits, wanted)
    mask_at, masks = _masks(wanted, eos_id, vocabulary)
    return draw(
        logits,
        Choices(
            num_rows=num_rows,
            temperature=np.array(
                [p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params]
            ),
            top_p=np.array([p.top_p for p in params], np.float64),
            min_p=np.array([p.min_p for p in params], np.float64),
            top_k=np.array([p.top_k or vocabulary for p in params], np.int64),
            seed=np.array([p.seed for p in params], np.uint64),
            position=np.array([len(r.prompt_ids) + r.num_before for r in wanted], np.int64),
            replaced_at=replaced_at,
            replaced=replaced,
            mask_at=mask_at,
            masks=masks,
        ),
    )


def logprobs(
    logits: Tensor, ids: Sequence[int], k: int
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
    """Natural logarithms of the probabilities of ``ids``, one for every row of ``logits`` (fp32 [R, V]), and with ``k``
    the likeliest ids of every row.

    The distribution is the model's own, before bias, penalties, temperature and filters, normalised in float64.
    """
    found = token_logprobs(logits, _ids(ids), k)
    likeliest = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True) if k else ()
    return tuple(found.logprobs.tolist()), tuple(
        TopLogprobs(ids=tuple(row), logprobs=tuple(values)) for row, values in likeliest
    )


def warm_up() -> None:
    """Compile what sampling needs, so that the first request does not wait for it."""
    params = SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=1.0)
    logits = torch.zeros(1, 64)
    sample(logits, [SampledRows(params=params, prompt_ids=(0,), output_ids=())], 0)
    logprobs(logits, [0], 1)


def _replaced(logits: Tensor, wanted: Sequence[SampledRows]) -> tuple[Ints, Tensor]:
    """Where in the second tensor the adjusted logits of each request begin, -1 for those that stay as they are."""
    places: list[int] = []
    parts: list[Tensor] = []
    first = end = 0
    for rows in wanted:
        p = rows.params
        changes = (
            p.logit_bias or p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        )
        places.append(end if changes else -1)
        if changes:
            parts.append(adjust(logits, first, _adjustment(rows)))
            end += rows.num_rows
        first += rows.num_rows
    return np.array(places, np.int64), torch.cat(parts) if parts else logits[:0]


def _adjustment(rows: SampledRows) -> Adjustment:
    params = rows.params
    output, drafts = _ids(rows.output_ids), _ids(rows.drafts)
    if rows.last_only:
        output, drafts = np.concatenate((output, drafts)), drafts[:0]
    return Adjustment(
        bias_ids=_ids([token for token, _ in params.logit_bias]),
        biases=np.array([bias for _, bias in params.logit_bias], np.float32),
        prompt_ids=_distinct(_Same(rows.prompt_ids))
        if params.repetition_penalty != 1
        else output[:0],
        output_ids=output,
        draft_ids=drafts,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )


def _masks(wanted: Sequence[SampledRows], eos_id: int, vocabulary: int) -> tuple[Ints, Words]:
    """Where the masks of each request begin, -1 for those without."""
    places: list[int] = []
    parts: list[Words] = []
    words = -(-vocabulary // 32)
    end = 0
    for rows in wanted:
        mask = rows.mask
        params = rows.params
        num_banned = min(params.min_tokens - rows.num_before, rows.num_rows)
        if num_banned > 0:
            full = np.full((rows.num_rows, words), 0xFFFFFFFF, np.uint32)
            mask = full if mask is None else mask & full
            ending = (
                params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, eos_id)
            )
            for token in ending:
                mask[:num_banned, token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
        places.append(-1 if mask is None else end)
        if mask is not None:
            assert mask.shape == (rows.num_rows, words), "a mask has one row for each sampled token"
            parts.append(mask)
            end += rows.num_rows
    return np.array(places, np.int64), (
        np.concatenate(parts) if parts else np.empty((0, words), np.uint32)
    )


def _ids(ids: Sequence[int]) -> Ints:
    return np.array(ids, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A tuple that equals itself alone: comparing two long prompts would take as long as reading them."""

    ids: tuple[int, ...]

    def __hash__(self) -> int:
        return id(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.ids is self.ids


@lru_cache(maxsize=_PROMPTS_KEPT)
def _distinct(prompt: _Same) -> Ints:
    """The ids of a prompt, each once; kept, for a prompt is asked about in every step of its answer."""
    return np.unique(_ids(prompt.ids))
