"""What is asked of the cluster, and what comes back: plain values that cross every process border."""

import math
from dataclasses import dataclass, field

from .errors import InvalidRequestError
from .timeline import Timeline

MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_REQUEST_ID_CHARACTERS = 256


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} = {value!r} is not allowed: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen.

    Temperature 0 is greedy. ``top_k`` 0 keeps every token. ``seed`` names the random stream: together with the
    position of a token it decides that token's random number, so a request gives the same tokens on any rank.
    Raises InvalidRequestError for a value outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer of at least 1")
        _require(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
            "temperature",
            self.temperature,
            "a number from 0 (greedy) to 100",
        )
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "a number above 0, up to 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or a positive integer")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"an integer from 0 to {MAX_SEED}")
        _require(
            0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
            "top_logprobs",
            self.top_logprobs,
            f"an integer from 0 to {MAX_TOP_LOGPROBS}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued. ``prompt_ids`` are token ids, BOS included, at least one."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        _require(
            1 <= len(self.request_id) <= MAX_REQUEST_ID_CHARACTERS,
            "request_id",
            self.request_id[:MAX_REQUEST_ID_CHARACTERS],
            f"a string of 1 to {MAX_REQUEST_ID_CHARACTERS} characters",
        )
        _require(bool(self.prompt_ids), "prompt_ids", self.prompt_ids, "at least one token id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The likeliest tokens of one position: ids and natural logarithms of the raw model distribution."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to a request.

    ``finish_reason`` is ``stop`` (the last id is EOS; text leaves it out) or ``length``. A request that failed has no
    Completion; it raises instead.
    """

    request_id: str
    ids: tuple[int, ...]
    finish_reason: str
    timeline: Timeline
    top_logprobs: tuple[TopLogprobs, ...] = ()
