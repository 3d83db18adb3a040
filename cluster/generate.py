"""``headrace generate``: one prompt continued in this process, without a cluster.

It is the reference that the cluster is compared with: the same network and sampler in a plain loop, always
deterministic. A cluster under ``deterministic: true`` gives the same tokens.

    prompt rows 0 .. N-2 in chunks | row N-1, samples token N | row N, samples token N+1 | ...
    decoder layers run rows >= N - keep, or all of them with --exact
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..decode.admission import output_limit
from ..decode.sampler import sample, top_logprobs
from ..decode.scheduler import HISTORY_TOKENS, finish_reason
from ..model.batch import Logits, Span
from ..model.config import load_config
from ..model.network import Network, NetworkOptions, load_network
from ..model.tokenizer import Tokenizer
from ..transfer.errors import ConfigError, InvalidRequestError, PromptTooLongError
from ..transfer.request import SamplingParams, TopLogprobs

CHUNK_TOKENS = 512
_SCORE_TOP_LOGPROBS = 20
_SLOT = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One sampled token, with its position's likeliest tokens when they were asked for."""

    token_id: int
    finish_reason: str | None
    top_logprobs: TopLogprobs | None


def prompt_logits(
    network: Network, prompt_ids: Sequence[int], *, exact: bool, score: bool
) -> Iterator[Tensor]:
    """Run the prompt in chunks; yield logits [n, V] of every prompt row with ``score``, else of the last row only."""
    rows = len(prompt_ids)
    tail_start = 0 if exact or score else max(0, rows - network.keep)
    begin = 0
    while begin < rows:
        end = rows if begin == rows - 1 else min(begin + CHUNK_TOKENS, rows - 1)
        last = end == rows
        wanted = Logits.ALL if score else Logits.LAST if last else Logits.NONE
        logits = network.forward([_span(network, prompt_ids, begin, end, tail_start, wanted)])
        if score or last:
            yield logits
        begin = end


def continue_prompt(
    network: Network,
    prompt_ids: Sequence[int],
    first: Tensor,
    params: SamplingParams,
    *,
    exact: bool,
    num_logprobs: int,
) -> Iterator[Step]:
    """Sample from ``first``, the logits [1, V] of the last prompt row, and go on until a stop or the length."""
    ids, logits = list(prompt_ids), first
    tail_start = 0 if exact else max(0, len(prompt_ids) - network.keep)
    config = network.config
    limit = output_limit(len(prompt_ids), params.max_tokens, config.max_position_embeddings)
    for count in range(1, limit + 1):
        token = sample(logits, [params], [len(ids)])[0]
        reason = finish_reason(token, count, limit, params, config.eos_token_id)
        likeliest = top_logprobs(logits, num_logprobs)[0] if num_logprobs else None
        yield Step(token_id=token, finish_reason=reason, top_logprobs=likeliest)
        if reason is not None:
            return
        ids.append(token)
        span = _span(network, ids, len(ids) - 1, len(ids), tail_start, Logits.LAST)
        logits = network.forward([span])


def _span(
    network: Network, ids: Sequence[int], begin: int, end: int, tail_start: int, logits: Logits
) -> Span:
    num_blocks = -(-end // network.options.block_tokens)
    return Span(
        token_ids=tuple(ids[begin:end]),
        start=begin,
        history=tuple(ids[max(0, begin - HISTORY_TOKENS) : begin]),
        slot=_SLOT,
        blocks=tuple(range(1, 1 + num_blocks)),
        tail_start=tail_start,
        logits=logits,
    )


def open_for_one(
    directory: Path,
    num_tokens: int,
    *,
    numerics: str,
    keep: int | None = None,
    block_tokens: int = 128,
) -> Network:
    """The checkpoint in ``directory`` with caches for one request of ``num_tokens`` tokens, on one thread."""
    torch.set_num_threads(1)
    options = NetworkOptions(
        numerics=numerics,
        deterministic=True,
        block_tokens=block_tokens,
        num_blocks=1 + max(1, -(-num_tokens // block_tokens)),
        num_slots=1 + _SLOT,
        keep=keep,
    )
    return load_network(directory, options=options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``headrace generate``."""
    parser.add_argument("checkpoint", type=Path, help="model directory in the released layout")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--chat", metavar="TEXT", help="what the user says; the assistant answers")
    prompt.add_argument("--ids", metavar="1,2,3", help="token ids to continue, nothing is added")
    parser.add_argument("--max-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1, nothing is cut off")
    parser.add_argument("--top-k", type=int, default=0, help="default: 0, nothing is cut off")
    parser.add_argument("--seed", type=int, default=0, help="names the random stream; default: 0")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        metavar="K",
        help=f"report the K likeliest tokens of every position; default: 0, with --score {_SCORE_TOP_LOGPROBS}",
    )
    parser.add_argument(
        "--numerics",
        choices=("released", "plain"),
        default="released",
        help="plain: mathematics without any rounding to storage formats; default: released",
    )
    parser.add_argument("--exact", action="store_true", help="run all layers for all prompt rows")
    parser.add_argument(
        "--score", action="store_true", help="also report every prompt position; implies --exact"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """Carry out ``headrace generate``. Returns the document with ``--json``, else writes text as it comes."""
    directory: Path = args.checkpoint
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    asked_ids = None if args.ids is None else _parse_ids(args.ids)
    config = load_config(directory)
    tokenizer = Tokenizer(directory, config)
    if asked_ids is not None:
        prompt_ids = asked_ids
    elif args.chat is not None:
        prompt_ids = tokenizer.encode_chat([{"role": "user", "content": args.chat}])
    else:
        prompt_ids = tokenizer.encode_prompt(args.prompt)
    _check_prompt(prompt_ids, config.vocab_size, config.max_position_embeddings)
    num_logprobs = _num_logprobs(args.top_logprobs, args.score, config.vocab_size)
    exact = bool(args.exact or args.score)
    network = open_for_one(directory, len(prompt_ids) + params.max_tokens, numerics=args.numerics)

    scored: list[TopLogprobs] = []
    last = torch.empty(0)
    for logits in prompt_logits(network, prompt_ids, exact=exact, score=args.score):
        if args.score:
            scored.extend(top_logprobs(logits, num_logprobs))
        last = logits[-1:]
    decoder = tokenizer.incremental()
    steps: list[Step] = []
    text = ""
    for step in continue_prompt(
        network, prompt_ids, last, params, exact=exact, num_logprobs=num_logprobs
    ):
        steps.append(step)
        piece = decoder.push([step.token_id])
        text += piece
        if not args.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    rest = decoder.finish()
    if not args.json:
        sys.stdout.write(rest + "\n")
        return None
    document: dict[str, object] = {
        "prompt_ids": list(prompt_ids),
        "ids": [step.token_id for step in steps],
        "text": text + rest,
        "top_logprobs": [_plain(step.top_logprobs) for step in steps if step.top_logprobs],
        "finish_reason": steps[-1].finish_reason,
    }
    if args.score:
        document["prompt_top_logprobs"] = [_plain(entry) for entry in scored]
    return document


def _plain(entry: TopLogprobs) -> dict[str, list[float]]:
    return {"ids": list(entry.ids), "logprobs": list(entry.logprobs)}


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--ids {text!r}: give token ids separated by commas, such as 0,17,42"
        ) from None


def _check_prompt(prompt_ids: Sequence[int], vocab: int, context: int) -> None:
    foreign = [token for token in prompt_ids if not 0 <= token < vocab]
    if foreign:
        raise InvalidRequestError(
            f"token id {foreign[0]} is not in the vocabulary: allowed are 0 to {vocab - 1}"
        )
    if len(prompt_ids) >= context:
        raise PromptTooLongError(
            f"{len(prompt_ids)} prompt tokens leave no room for an answer in the context of {context} tokens: shorten"
            " the prompt"
        )


def _num_logprobs(asked: int | None, score: bool, vocab: int) -> int:
    if asked is None:
        return min(_SCORE_TOP_LOGPROBS, vocab) if score else 0
    lowest = 1 if score else 0
    if not lowest <= asked <= vocab:
        raise InvalidRequestError(f"--top-logprobs {asked}: allowed are {lowest} to {vocab}")
    return asked
