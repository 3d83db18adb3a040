"""Rounds of drafting and verification by the product's network, drafter and sampler: what is accepted, and when.

The answer is the one that the network gives without drafts; a draft is accepted when it equals it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...decode.sampler import SampledRows, sample
from ...model.batch import Logits
from ...model.drafter import DraftSpan
from ...model.network import Network
from ...transfer.request import SamplingParams
from . import corpus
from .batches import BOS_ID, EOS_ID
from .own_output import span_of


@dataclass(frozen=True)
class Round:
    """One block of drafts.

    `accepted` leading drafts were right; `confidences` [G]; `chances`, one a draft up to the first wrong one: how
    likely rejection sampling would accept it, 1 - TV of the distributions of drafter and network.
    """

    accepted: int
    confidences: list[float]
    chances: list[float]


@dataclass
class Answer:
    """A request under way: `ids` so far, prompt included, of which `done` are computed."""

    prompt: list[int]
    params: SamplingParams
    ids: list[int] = field(default_factory=list)
    done: int = 0
    rounds: list[Round] = field(default_factory=list)

    def rows(self, drafts: Sequence[int], last_only: bool) -> SampledRows:
        """What the sampler needs for the token after `drafts`, or for every one up to there."""
        return SampledRows(
            params=self.params,
            prompt_ids=tuple(self.prompt),
            output_ids=self.ids[len(self.prompt) :],
            drafts=drafts,
            last_only=last_only,
        )


def held_out_prompts(tokenizer, number: int, tokens: int) -> list[list[int]]:
    """`number` prompts of `tokens` tokens, BOS and source of held-out modules, evenly spread over them."""
    _, held_out = corpus.split(corpus.read_standard_library())
    texts = [tokenizer.encode(d.text, add_special_tokens=False).ids for d in held_out]
    places = [(text, start) for text in texts for start in range(0, len(text) - tokens, tokens)]
    step = max(1, len(places) // number)
    return [[BOS_ID, *text[start : start + tokens - 1]] for text, start in places[::step]][:number]


def answers(
    network: Network, prompts: list[list[int]], temperature: float, new_tokens: int
) -> list[Answer]:
    """Answers of at least `new_tokens` tokens, EOS or not, all drafts of every round verified."""
    length = max(len(prompt) for prompt in prompts) + new_tokens + network.drafter.block_size + 1
    made = [
        Answer(
            prompt,
            SamplingParams(temperature=temperature, max_tokens=new_tokens, seed=seed),
            list(prompt),
        )
        for seed, prompt in enumerate(prompts)
    ]
    for row in range(len(made)):
        network.cache.clear_slot(row + 1)
    drafts: list[list[int]] = [[] for _ in made]
    proposals: list[tuple[list[float], list[torch.Tensor]]] = [([], []) for _ in made]
    while True:
        rows = [r for r, a in enumerate(made) if len(a.ids) - len(a.prompt) < new_tokens]
        if not rows:
            return made
        _verify(network, made, rows, drafts, proposals, length)
        _draft(network, made, rows, drafts, proposals)


def _verify(network, made, rows, drafts, proposals, length) -> None:
    """Compute every answer's newest token and its drafts, and keep what is right of them."""
    spans = []
    for row in rows:
        answer = made[row]
        first = answer.done == 0
        spans.append(
            span_of(
                network,
                row,
                answer.ids + drafts[row],
                answer.done,
                len(answer.prompt),
                length,
                Logits.LAST if first else Logits.ALL,
            )
        )
    logits = network.forward(spans)
    tokens = sample(logits, [made[row].rows(drafts[row], False) for row in rows], EOS_ID).tolist()
    begin = 0
    for row in rows:
        answer, guesses = made[row], drafts[row]
        own, found = logits[begin:], tokens[begin : begin + len(guesses) + 1]
        begin += len(guesses) + 1
        accepted = next((i for i, g in enumerate(guesses) if g != found[i]), len(guesses))
        if guesses:
            confidences, shares = proposals[row]
            judged = shares[: accepted + 1]
            target = _shares(own[: len(judged)], answer.params.temperature)
            chances = (1 - (torch.stack(judged) - target).abs().sum(1) / 2).tolist()
            answer.rounds.append(Round(accepted, confidences, chances))
        answer.done = len(answer.ids) + accepted
        answer.ids += found[: accepted + 1]


def _draft(network, made, rows, drafts, proposals) -> None:
    """New drafts for every answer, sampled with the noise of their places."""
    spans = []
    for row in rows:
        answer = made[row]
        floor = max(0, len(answer.prompt) - network.keep)
        at = len(answer.ids) - 1
        spans.append(DraftSpan(token_id=answer.ids[at], position=at, slot=row + 1, floor=floor))
        drafts[row] = []
        proposals[row] = ([], [])

    def choose(_place, logits):
        ids = sample(logits, [made[row].rows(drafts[row], True) for row in rows], EOS_ID).tolist()
        shares = _shares(logits, made[rows[0]].params.temperature)
        for row, token, share in zip(rows, ids, shares, strict=True):
            drafts[row].append(token)
            proposals[row][1].append(share)
        return ids

    confidences = network.drafter.draft(spans, choose).confidences
    for row, values in zip(rows, confidences.tolist(), strict=True):
        proposals[row] = (values, proposals[row][1])


def _shares(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Probabilities [R, V]; one-hot at temperature 0."""
    if temperature:
        return (logits / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[1]).float()
