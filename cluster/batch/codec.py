"""Between a line's prompt and the ids the cluster works on: a small protocol, and the model's tokenizer behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...model.tokenizer import Tokenizer
from .fields import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from .structured import THINKING_END


class TextCodec(Protocol):
    """What a batch needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this number."""
        ...

    @property
    def eos(self) -> int:
        """Id that ends an answer."""
        ...

    @property
    def thinking_end(self) -> int | None:
        """Id that ends the thinking part of an answer; None when the vocabulary has none."""
        ...

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, BOS included. Raises InvalidRequestError for one the model's format cannot hold."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Bytes of one token."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerCodec:
    """The codec of a checkpoint."""

    tokenizer: Tokenizer
    vocab_size: int
    eos: int
    thinking_end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerCodec":
        """The codec that uses ``tokenizer``."""
        ids = tokenizer.encode(THINKING_END)
        return cls(
            tokenizer,
            tokenizer.vocab_size,
            tokenizer.eos_token_id,
            ids[0] if len(ids) == 1 else None,
        )

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """See TextCodec."""
        match prompt:
            case TextPrompt(text=text):
                return tuple(self.tokenizer.encode_prompt(text))
            case IdsPrompt(ids=ids):
                return ids
            case ChatPrompt():
                return tuple(
                    self.tokenizer.encode_chat(
                        _messages(prompt),
                        thinking=prompt.thinking,
                        effort=prompt.effort,
                        tools=prompt.tools,
                        tool_choice=prompt.tool_choice if prompt.tools else None,
                        response_format=prompt.response_format,
                    )
                )

    def decode(self, ids: Sequence[int]) -> str:
        """See TextCodec."""
        return self.tokenizer.decode(ids)

    def bytes_of(self, token: int) -> bytes:
        """See TextCodec."""
        return self.tokenizer.token_bytes[token]


def _messages(prompt: ChatPrompt) -> list[dict[str, Any]]:
    return [
        {"role": turn.role, "content": turn.content}
        | ({} if turn.reasoning is None else {"reasoning_content": turn.reasoning})
        | ({"tool_calls": list(turn.calls)} if turn.calls else {})
        | ({} if turn.answers_call is None else {"tool_call_id": turn.answers_call})
        for turn in prompt.messages
    ]
