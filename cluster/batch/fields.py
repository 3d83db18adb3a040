"""The fields of a request body: which are read, which are accepted only at their neutral value, which say nothing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard, TypeVar, cast

from ...transfer.errors import InvalidRequestError
from ...transfer.request import MAX_SEED

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
    }
)
# Accepted when absent, null or one of these values, because then they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_KEYS = (
    "role",
    "content",
    "name",
    "reasoning_content",
    "refusal",
    "tool_calls",
    "tool_call_id",
)
_CALL = 'in an assistant message a list of {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. ``reasoning`` and ``calls`` are an earlier answer's, where the caller sends them back.

    ``answers_call`` is the id of the call that a tool's turn answers.
    """

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[Mapping[str, object], ...] = ()
    answers_call: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat format.

    ``tool_choice`` is "auto" or "required", and means nothing without tools.
    """

    messages: tuple[ChatMessage, ...]
    thinking: bool
    effort: str | None
    tools: tuple[Mapping[str, object], ...] = ()
    tool_choice: str = "auto"
    response_format: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text to be continued."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsPrompt:
    """Token ids to be continued as they are; nothing is put before them."""

    ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | IdsPrompt


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


def is_int(value: object) -> TypeGuard[int]:
    """An integer of 64 bits; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_SEED


def is_number(value: object) -> TypeGuard[float]:
    """A number; true and false are none."""
    return isinstance(value, float) or is_int(value)


def is_bool(value: object) -> TypeGuard[bool]:
    """True or false."""
    return isinstance(value, bool)


def is_str(value: object) -> TypeGuard[str]:
    """A string."""
    return isinstance(value, str)


def is_list(value: object) -> TypeGuard[list[object]]:
    """A list."""
    return isinstance(value, list)


def is_dict(value: object) -> TypeGuard[dict[str, object]]:
    """An object."""
    return isinstance(value, dict)


def read_text_prompt(fields: Fields) -> TextPrompt | IdsPrompt:
    """``prompt``: a string, a list of token ids, or a list of one of these."""
    allowed = "one string, or one list of token ids (one prompt a line)"
    value = fields.take("prompt")
    if is_list(value) and len(value) == 1 and not is_int(value[0]):
        value = value[0]
    if is_str(value) and value:
        return TextPrompt(text=value)
    if is_list(value) and value and all(is_int(item) and item >= 0 for item in value):
        return IdsPrompt(ids=tuple(cast("list[int]", value)))
    raise fields.error("prompt", value, allowed)


def read_chat_prompt(fields: Fields) -> ChatPrompt:
    """``messages`` with ``thinking`` ({"type": "enabled" | "disabled"}) and ``reasoning_effort``.

    A line that asks for no thinking gets none; an effort other than "none" asks for it.
    """
    messages = fields.take_as("messages", "a list of messages", is_list)
    if not messages:
        raise fields.error("messages", messages, "at least one message")
    turns = tuple(_message(fields, index, item) for index, item in enumerate(messages))
    effort = fields.take_as("reasoning_effort", f"one of {', '.join(EFFORTS)}", is_str)
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
    if not is_dict(item):
        raise fields.error(name, item, "an object with role and content")
    role = item.get("role")
    if not is_str(role) or role not in ROLES:
        raise fields.error(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    for key, value in item.items():
        if key not in _MESSAGE_KEYS and value not in (None, []):
            raise InvalidRequestError(
                f"{name}.{key} is not supported in a batch; take it out of the line"
            )
    reasoning = item.get("reasoning_content")
    if reasoning is not None and not (is_str(reasoning) and role == "assistant"):
        raise fields.error(
            f"{name}.reasoning_content", reasoning, "a string, in an assistant message"
        )
    calls = tuple(_calls(fields, name, item, role))
    answers_call = item.get("tool_call_id")
    if (is_str(answers_call) and bool(answers_call)) != (role == "tool"):
        raise fields.error(f"{name}.tool_call_id", answers_call, "a string, in a tool message")
    content = item.get("content")
    if content is None and calls:
        content = ""
    if is_list(content):
        parts = [_part(fields, f"{name}.content[{at}]", part) for at, part in enumerate(content)]
        content = "".join(parts)
    if not is_str(content):
        raise fields.error(f"{name}.content", content, "a string or a list of text parts")
    return ChatMessage(
        role="system" if role == "developer" else role,
        content=content,
        reasoning=reasoning,
        calls=calls,
        answers_call=answers_call if is_str(answers_call) else None,
    )


def _calls(
    fields: Fields, name: str, item: Mapping[str, object], role: str
) -> Iterator[Mapping[str, object]]:
    calls = item.get("tool_calls")
    if calls in (None, []):
        return
    for call in calls if is_list(calls) and role == "assistant" else [calls]:
        if not is_dict(call) or not is_str(call.get("id")) or not is_dict(call.get("function")):
            raise fields.error(f"{name}.tool_calls", call, _CALL)
        yield call


def _part(fields: Fields, name: str, part: object) -> str:
    if is_dict(part) and part.get("type") == "text" and is_str(text := part.get("text")):
        return text
    raise fields.error(
        name, part, 'a part {"type": "text", "text": ...}; batches take no images or audio'
    )
