"""What a request body says about choosing tokens: names and defaults of the OpenAI API, and vLLM's for the rest."""

from dataclasses import dataclass

from ...transfer.request import MAX_SEED, MAX_TOP_LOGPROBS, Grammar, SamplingParams
from .fields import Fields, is_bool, is_dict, is_int, is_list, is_number, is_str

MAX_CHOICES = 128
_PENALTY = "a number from -2 to 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """``params`` of the first of ``num_choices`` answers; their max_tokens count only where ``has_max_tokens``.

    ``num_logprobs`` is how many alternatives per token the answer shows, None for no logprobs at all. With
    ``include_stop`` texts end with the stop string, otherwise before it.
    """

    params: SamplingParams
    has_max_tokens: bool
    num_logprobs: int | None
    num_choices: int
    include_stop: bool


def read_sampling(
    fields: Fields, *, chat: bool, default_seed: int, grammar: Grammar | None = None
) -> Sampling:
    """Take the sampling fields, all but ``grammar``. Raises InvalidRequestError for one that is not allowed."""
    max_tokens = fields.take_as("max_tokens", "an integer of at least 1", is_int)
    if chat:
        newer = fields.take_as("max_completion_tokens", "an integer of at least 1", is_int)
        max_tokens = max_tokens if newer is None else newer
    min_tokens = fields.take_as("min_tokens", "an integer from 0 to max_tokens", is_int) or 0
    top_k = fields.take_as("top_k", "0 (all tokens) or a positive integer", is_int)
    seed = fields.take_as("seed", f"an integer from 0 to {MAX_SEED}", is_int)
    num_logprobs = _read_logprobs(fields, chat=chat)
    return Sampling(
        params=SamplingParams(
            max_tokens=max(min_tokens, 1) if max_tokens is None else max_tokens,
            min_tokens=min_tokens,
            temperature=_number(fields, "temperature", 1.0, "a number from 0 (greedy) to 100"),
            top_p=_number(fields, "top_p", 1.0, "a number above 0, up to 1"),
            min_p=_number(fields, "min_p", 0.0, "a number from 0 to 1"),
            presence_penalty=_number(fields, "presence_penalty", 0.0, _PENALTY),
            frequency_penalty=_number(fields, "frequency_penalty", 0.0, _PENALTY),
            repetition_penalty=_number(
                fields, "repetition_penalty", 1.0, "a number above 0, up to 10"
            ),
            top_k=0 if top_k in (None, -1) else top_k,
            logit_bias=_read_bias(fields),
            seed=default_seed if seed is None else seed,
            ignore_eos=bool(fields.take_as("ignore_eos", "true or false", is_bool)),
            stop=_read_stop(fields),
            stop_token_ids=_read_stop_ids(fields),
            logprobs=num_logprobs is not None,
            top_logprobs=num_logprobs or 0,
            prompt_logprobs=_count(fields, "prompt_logprobs"),
            grammar=grammar,
        ),
        has_max_tokens=max_tokens is not None,
        num_logprobs=num_logprobs,
        num_choices=_read_choices(fields),
        include_stop=bool(fields.take_as("include_stop_str_in_output", "true or false", is_bool)),
    )


def _number(fields: Fields, name: str, default: float, allowed: str) -> float:
    value = fields.take_as(name, allowed, is_number)
    return default if value is None else float(value)


def _count(fields: Fields, name: str) -> int | None:
    """How many of the likeliest tokens are asked for."""
    allowed = f"an integer from 0 to {MAX_TOP_LOGPROBS}"
    number = fields.take_as(name, allowed, is_int)
    if number is not None and not 0 <= number <= MAX_TOP_LOGPROBS:
        raise fields.error(name, number, allowed)
    return number


def _read_logprobs(fields: Fields, *, chat: bool) -> int | None:
    """Alternatives to report per token; None when no logprobs are wanted."""
    if not chat:
        return _count(fields, "logprobs")
    wanted = fields.take_as("logprobs", "true or false", is_bool)
    number = _count(fields, "top_logprobs")
    if number and not wanted:
        raise fields.error("top_logprobs", number, "logprobs must be true beside it")
    return (number or 0) if wanted else None


def _read_choices(fields: Fields) -> int:
    allowed = f"an integer from 1 to {MAX_CHOICES}"
    number = fields.take_as("n", allowed, is_int)
    if number is not None and not 1 <= number <= MAX_CHOICES:
        raise fields.error("n", number, allowed)
    return 1 if number is None else number


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if is_str(value):
        return (value,) if value else ()
    items = [] if value is None else value
    if not is_list(items):
        raise fields.error("stop", value, "a string or a list of strings")
    stops = tuple(item for item in items if is_str(item))
    if len(stops) < len(items):
        raise fields.error("stop", value, "a string or a list of strings")
    return stops


def _read_stop_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.take_as("stop_token_ids", "a list of token ids", is_list) or []
    ids = tuple(item for item in value if is_int(item))
    if len(ids) < len(value):
        raise fields.error("stop_token_ids", value, "a list of token ids")
    return ids


def _read_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """{"id": bias}; JSON has no keys but strings."""
    allowed = 'an object of token ids and numbers from -100 to 100, such as {"50": -100}'
    value = fields.take_as("logit_bias", allowed, is_dict) or {}
    pairs: list[tuple[int, float]] = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and is_number(bias)):
            raise fields.error("logit_bias", value, allowed)
        pairs.append((int(key), float(bias)))
    return tuple(pairs)
