"""The fields of a request body: which are read, which are accepted only at their neutral value, which say nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard, TypeVar, cast

from ...transfer.errors import InvalidRequestError
from ...transfer.request import MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams

# They describe the caller or the bill; an answer is the same without them.
IRRELEVANT = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "stream_options",
        "parallel_tool_calls",
    }
)
# Accepted when absent, null or one of these values, because then they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
}
T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. ``reasoning`` is an earlier answer's thinking, where the caller sends it back."""

    role: str
    content: str
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat format."""

    messages: tuple[ChatMessage, ...]
    thinking: bool
    effort: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text to be continued."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsPrompt:
    """Token ids to be continued as they are; nothing is put before them."""

    ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | IdsPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a body says about choosing tokens."""

    params: SamplingParams
    has_max_tokens: bool
    num_logprobs: int | None


class Fields:
    """A body whose fields are taken one by one; ``finish`` refuses what nobody took. Null means absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._where = where

    def take(self, name: str) -> object:
        """The field's value, or None; it counts as read."""
        return self._values.pop(name, None)

    def take_as(self, name: str, allowed: str, check: Callable[[object], TypeGuard[T]]) -> T | None:
        """The field's value if ``check`` accepts it, None if absent; raises InvalidRequestError otherwise."""
        value = self.take(name)
        if value is None or check(value):
            return value
        raise self.error(name, value, allowed)

    def error(self, name: str, value: object, allowed: str) -> InvalidRequestError:
        """An error that names the field, what it holds and what it may hold."""
        text = repr(value)
        shown = text if len(text) <= 80 else text[:77] + "..."
        return InvalidRequestError(f"{self._where}{name} = {shown} is not allowed: {allowed}")

    def finish(self) -> None:
        """Raises InvalidRequestError for a field that is left and would change the answer."""
        for name, value in self._values.items():
            if name in IRRELEVANT:
                continue
            if name not in NEUTRAL:
                raise InvalidRequestError(
                    f"{self._where}{name} is not supported in a batch; take it out of the line"
                )
            if not any(value == neutral for neutral in NEUTRAL[name]):
                allowed = " or ".join(repr(neutral) for neutral in NEUTRAL[name])
                raise self.error(name, value, f"only {allowed} is supported in a batch")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_SEED


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bool(value: object) -> TypeGuard[bool]:
    return isinstance(value, bool)


def _is_str(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _is_dict(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def read_text_prompt(fields: Fields) -> TextPrompt | IdsPrompt:
    """``prompt``: a string, a list of token ids, or a list of one of these."""
    allowed = "one string, or one list of token ids (one prompt a line)"
    value = fields.take("prompt")
    if _is_list(value) and len(value) == 1 and not _is_int(value[0]):
        value = value[0]
    if _is_str(value) and value:
        return TextPrompt(text=value)
    if _is_list(value) and value and all(_is_int(item) and item >= 0 for item in value):
        return IdsPrompt(ids=tuple(cast("list[int]", value)))
    raise fields.error("prompt", value, allowed)


def read_chat_prompt(fields: Fields) -> ChatPrompt:
    """``messages`` with ``thinking`` ({"type": "enabled" | "disabled"}) and ``reasoning_effort``.

    A line that asks for no thinking gets none; an effort other than "none" asks for it.
    """
    messages = fields.take_as("messages", "a list of messages", _is_list)
    if not messages:
        raise fields.error("messages", messages, "at least one message")
    turns = tuple(_message(fields, index, item) for index, item in enumerate(messages))
    effort = fields.take_as("reasoning_effort", f"one of {', '.join(EFFORTS)}", _is_str)
    if effort is not None and effort not in EFFORTS:
        raise fields.error("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
    switch = fields.take("thinking")
    if switch not in (None, {"type": "enabled"}, {"type": "disabled"}):
        raise fields.error("thinking", switch, '{"type": "enabled"} or {"type": "disabled"}')
    thinking = effort not in (None, "none") if switch is None else switch == {"type": "enabled"}
    return ChatPrompt(
        messages=turns, thinking=thinking, effort=effort if thinking and effort != "none" else None
    )


def _message(fields: Fields, index: int, item: object) -> ChatMessage:
    name = f"messages[{index}]"
    if not _is_dict(item):
        raise fields.error(name, item, "an object with role and content")
    role = item.get("role")
    if not _is_str(role) or role not in ROLES:
        raise fields.error(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    for key, value in item.items():
        if key not in ("role", "content", "name", "reasoning_content", "refusal") and value not in (
            None,
            [],
        ):
            raise InvalidRequestError(
                f"{name}.{key} is not supported in a batch; take it out of the line"
            )
    reasoning = item.get("reasoning_content")
    if reasoning is not None and not (_is_str(reasoning) and role == "assistant"):
        raise fields.error(
            f"{name}.reasoning_content", reasoning, "a string, in an assistant message"
        )
    content = item.get("content")
    if _is_list(content):
        parts = [_part(fields, f"{name}.content[{at}]", part) for at, part in enumerate(content)]
        content = "".join(parts)
    if not _is_str(content):
        raise fields.error(f"{name}.content", content, "a string or a list of text parts")
    return ChatMessage(
        role="system" if role == "developer" else role, content=content, reasoning=reasoning
    )


def _part(fields: Fields, name: str, part: object) -> str:
    if _is_dict(part) and part.get("type") == "text" and _is_str(text := part.get("text")):
        return text
    raise fields.error(
        name, part, 'a part {"type": "text", "text": ...}; batches take no images or audio'
    )


def read_sampling(fields: Fields, *, chat: bool, default_seed: int) -> Sampling:
    """Sampling fields, with the defaults of the OpenAI API (temperature 1, top_p 1)."""
    max_tokens = fields.take_as("max_tokens", "an integer of at least 1", _is_int)
    if chat:
        newer = fields.take_as("max_completion_tokens", "an integer of at least 1", _is_int)
        max_tokens = max_tokens if newer is None else newer
    temperature = fields.take_as("temperature", "a number from 0 (greedy) to 100", _is_number)
    top_p = fields.take_as("top_p", "a number above 0, up to 1", _is_number)
    top_k = fields.take_as("top_k", "0 (all tokens) or a positive integer", _is_int)
    seed = fields.take_as("seed", "an integer of at least 0", _is_int)
    ignore_eos = fields.take_as("ignore_eos", "true or false", _is_bool)
    num_logprobs = _read_logprobs(fields, chat=chat)
    return Sampling(
        params=SamplingParams(
            max_tokens=1 if max_tokens is None else max_tokens,
            temperature=1.0 if temperature is None else float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            top_k=0 if top_k in (None, -1) else top_k,
            seed=default_seed if seed is None else seed,
            ignore_eos=bool(ignore_eos),
            # all of them: the token that was drawn is to be found among them, however few the caller wants to see
            top_logprobs=0 if num_logprobs is None else MAX_TOP_LOGPROBS,
        ),
        has_max_tokens=max_tokens is not None,
        num_logprobs=num_logprobs,
    )


def _read_logprobs(fields: Fields, *, chat: bool) -> int | None:
    """Alternatives to report per token; None when no logprobs are wanted."""
    wanted = fields.take_as("logprobs", "true or false", _is_bool) if chat else True
    name = "top_logprobs" if chat else "logprobs"
    allowed = f"an integer from 0 to {MAX_TOP_LOGPROBS}"
    number = fields.take_as(name, allowed, _is_int)
    if number is not None and not 0 <= number <= MAX_TOP_LOGPROBS:
        raise fields.error(name, number, allowed)
    if number and not wanted:
        raise fields.error(name, number, "logprobs must be true beside it")
    return (number or 0) if chat and wanted else number
