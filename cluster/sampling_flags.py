"""Sampling on the command line: the flags of ``headrace generate``, and the SamplingParams they make."""

import argparse

from ..transfer.errors import ConfigError
from ..transfer.request import SamplingParams
from .grammar_flags import add_grammar_arguments, grammar_of


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--max-tokens", type=int, default=128, help="default: 128")
    parser.add_argument(
        "--min-tokens", type=int, default=0, help="nothing but the length ends the answer before"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1, nothing is cut off")
    parser.add_argument("--top-k", type=int, default=0, help="default: 0, nothing is cut off")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="share of the likeliest; default: 0"
    )
    parser.add_argument(
        "--presence-penalty", type=float, default=0.0, help="for ids in the answer; default: 0"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="for every time; default: 0"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="for the prompt's, too; default: 1"
    )
    parser.add_argument(
        "--logit-bias", metavar="ID=B,...", default="", help="added to the logits of ids"
    )
    parser.add_argument("--seed", type=int, default=0, help="names the random stream; default: 0")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="ends the answer; repeatable"
    )
    parser.add_argument(
        "--stop-token-ids", metavar="1,2,3", default="", help="ids that end the answer"
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="report the logprob of every token of the answer"
    )
    parser.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="report every prompt token's logprob, its rank and the K likeliest; implies --exact",
    )
    add_grammar_arguments(parser)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the flags ask for. Raises InvalidRequestError for a value outside its range, ConfigError for no value."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        logit_bias=_parse_bias(args.logit_bias),
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        stop=tuple(args.stop),
        stop_token_ids=tuple(parse_ids("--stop-token-ids", args.stop_token_ids))
        if args.stop_token_ids
        else (),
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
        grammar=grammar_of(args),
    )


def parse_ids(flag: str, text: str) -> list[int]:
    """Ids separated by commas. Raises ConfigError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{flag} {text!r}: give token ids separated by commas, such as 0,17,42"
        ) from None


def _parse_bias(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split("=") for part in text.split(",")] if text else []
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise ConfigError(
            f"--logit-bias {text!r}: give ID=BIAS pairs separated by commas, such as 17=-100,42=2.5"
        ) from None
