"""What is asked of the cluster, and what comes back: plain values that cross every process border."""

import math
from dataclasses import dataclass, field

from .errors import InvalidRequestError
from .timeline import Timeline

MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 100
MAX_SALT_CHARACTERS = 256
MAX_REQUEST_ID_CHARACTERS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_GRAMMAR_CHARACTERS = 1 << 20
GRAMMAR_KINDS = (
    "json_schema",
    "json_object",
    "regex",
    "ebnf",
    "tool_call",
    "tool_call_required",
)


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} = {value!r} is not allowed: {allowed}")


def _in_range(name: str, value: float, low: float, high: float, meaning: str = "") -> None:
    allowed = f"a number from {low:g} to {high:g}{meaning}"
    _require(math.isfinite(value) and low <= value <= high, name, value, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A language that an answer must belong to.

    ``kind`` is one of GRAMMAR_KINDS; ``text`` is the JSON schema, the regular expression, the EBNF grammar, or for tool
    calls JSON with ``tools`` and ``parallel_tool_calls`` as in Chat Completions (empty for ``json_object``). With a
    required tool call the prompt has opened it. With a ``trigger`` the answer is free until that text has appeared in
    it; what follows must belong to the language. Raises InvalidRequestError for a value outside its range.
    """

    kind: str
    text: str = ""
    trigger: str = ""

    def __post_init__(self) -> None:
        _require(self.kind in GRAMMAR_KINDS, "grammar kind", self.kind, f"one of {GRAMMAR_KINDS}")
        _require(
            len(self.text) <= MAX_GRAMMAR_CHARACTERS,
            "grammar length",
            len(self.text),
            f"at most {MAX_GRAMMAR_CHARACTERS} characters",
        )
        _require(
            bool(self.text) == (self.kind != "json_object"),
            "grammar text",
            self.text[:80],
            "empty for json_object, and only there",
        )
        _require(
            len(self.trigger) <= MAX_STOP_CHARACTERS,
            "grammar trigger length",
            len(self.trigger),
            f"at most {MAX_STOP_CHARACTERS} characters",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when an answer ends.

    Temperature 0 is greedy. ``top_k`` 0 keeps every token; ``min_p`` drops tokens less likely than that share of the
    likeliest one. ``presence_penalty`` and ``frequency_penalty`` look at the answer so far, ``repetition_penalty`` at
    the prompt too; ``logit_bias`` adds to the logits of ids. Those change logits before everything else.
    ``seed`` names the random stream: together with the position of a token it decides that token's random numbers, so
    a request gives the same tokens on any rank.

    An answer ends with EOS (unless ``ignore_eos``), one of ``stop_token_ids``, the token that completes one of the
    ``stop`` strings, or ``max_tokens``; before ``min_tokens`` tokens the first three cannot happen. ``logprobs`` asks
    for the chosen tokens' logarithms of probability, ``top_logprobs`` for the likeliest tokens of every position,
    ``prompt_logprobs`` for both at the prompt's positions (None: off; it runs all layers for all prompt rows, which may
    change what is sampled after them).
    Raises InvalidRequestError for a value outside its range.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer of at least 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens = {self.max_tokens}",
        )
        _in_range("temperature", self.temperature, 0.0, 100.0, " (0 is greedy)")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "a number above 0, up to 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or a positive integer")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require(
            0.0 < self.repetition_penalty <= 10.0,
            "repetition_penalty",
            self.repetition_penalty,
            "a number above 0, up to 10 (1 changes nothing)",
        )
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "number of logit_bias entries",
            len(self.logit_bias),
            f"at most {MAX_LOGIT_BIAS}",
        )
        _require(
            self.grammar is None or self.min_tokens == 0,
            "min_tokens",
            self.min_tokens,
            "0 beside a grammar, which says itself where an answer may end",
        )
        for token, bias in self.logit_bias:
            _require(token >= 0, "logit_bias id", token, "a token id")
            _in_range(f"logit_bias of {token}", bias, -100.0, 100.0)
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"an integer from 0 to {MAX_SEED}")
        _require(
            len(self.stop) <= MAX_STOPS
            and all(0 < len(s) <= MAX_STOP_CHARACTERS for s in self.stop),
            "stop",
            self.stop[: MAX_STOPS + 1],
            f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
        )
        _require(
            len(self.stop_token_ids) <= MAX_STOPS and all(t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids[: MAX_STOPS + 1],
            f"up to {MAX_STOPS} token ids",
        )
        for name in ("top_logprobs", "prompt_logprobs"):
            value: int | None = getattr(self, name)
            _require(
                value is None or 0 <= value <= MAX_TOP_LOGPROBS,
                name,
                value,
                f"an integer from 0 to {MAX_TOP_LOGPROBS}",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a logit_bias or stop id that the vocabulary does not have."""
        biased = [token for token, _ in self.logit_bias]
        for name, ids in (("logit_bias", biased), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                _require(
                    token < vocab_size, f"{name} id", token, f"an id from 0 to {vocab_size - 1}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued. ``prompt_ids`` are token ids, BOS included, at least one.

    Prompts of a higher ``priority`` run first. ``deadline_s`` after its arrival at a prefill rank a prompt that is not
    done is given up; None for never. ``exact`` runs all prompt rows through all layers and takes nothing approximate
    from a cache. Requests share cached prefixes only with those of the same ``cache_salt``.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline_s: float | None = None
    exact: bool = False
    cache_salt: str = ""

    def __post_init__(self) -> None:
        _require(
            1 <= len(self.request_id) <= MAX_REQUEST_ID_CHARACTERS,
            "request_id",
            self.request_id[:MAX_REQUEST_ID_CHARACTERS],
            f"a string of 1 to {MAX_REQUEST_ID_CHARACTERS} characters",
        )
        _require(bool(self.prompt_ids), "prompt_ids", self.prompt_ids, "at least one token id")
        _require(
            abs(self.priority) <= MAX_PRIORITY,
            "priority",
            self.priority,
            f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}",
        )
        _require(
            len(self.cache_salt) <= MAX_SALT_CHARACTERS,
            "cache_salt",
            self.cache_salt[:MAX_SALT_CHARACTERS],
            f"up to {MAX_SALT_CHARACTERS} characters",
        )
        _require(
            self.deadline_s is None or 0.0 < self.deadline_s < math.inf,
            "deadline_s",
            self.deadline_s,
            "seconds above 0, or none",
        )

    @property
    def is_exact(self) -> bool:
        """Whether nothing may be approximated: asked for, or implied by ``prompt_logprobs``."""
        return self.exact or self.sampling.prompt_logprobs is not None

    def tail_start(self, keep: int) -> int:
        """The first prompt row that runs all layers: ``keep`` rows do, or all of them where nothing is approximated."""
        if self.is_exact:
            return 0
        return max(0, len(self.prompt_ids) - keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The likeliest tokens of one position: ids and natural logarithms of the raw model distribution."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """A token of the prompt: its logarithm of probability, its rank from 1, and the likeliest in its place."""

    logprob: float
    rank: int
    likeliest: TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to a request.

    ``finish_reason`` is ``stop`` (the last id is EOS, a stop id or completes a stop string) or ``length``. A request
    that failed has no Completion; it raises instead. ``logprobs`` and ``top_logprobs`` have an entry for each id if
    they were asked for, ``prompt_logprobs`` one for each prompt id but the first, which nothing precedes.
    ``num_verified`` drafts were verified on the way and ``num_accepted`` of them accepted. ``num_cached`` tokens of the
    prompt came from the prefix cache.
    """

    request_id: str
    ids: tuple[int, ...]
    finish_reason: str
    timeline: Timeline
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    num_verified: int = 0
    num_accepted: int = 0
    num_cached: int = 0
