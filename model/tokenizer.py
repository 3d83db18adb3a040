"""Text to token ids and back, with the checkpoint's own ``tokenizer.json``; chats through ``deepseek-recipe``.

Source: spec model.md sections 8.5 and 8.6.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import deepseek_recipe as recipe
import tokenizers

from ..transfer.errors import CheckpointError, InvalidRequestError
from .config import ModelConfig
from .detokenizer import IncrementalDecoder, token_bytes
from .engram_tables import compressed_token_map

#: Spelling of the tokens that every prompt needs, and the configuration key that holds the id of each.
SPECIAL_TOKENS: Final = {
    "bos_token_id": "<｜begin▁of▁sentence｜>",
    "eos_token_id": "<｜end▁of▁sentence｜>",
    "pad_token_id": "<｜▁pad▁｜>",
}
_IMAGE_TOKEN: Final = "<｜deepseek_image｜>"
_RECIPE_MODEL: Final = "DeepSeek-V4.1-Flash"


class Tokenizer:
    """The tokenizer of one model directory; immutable, safe to share between threads."""

    def __init__(self, directory: str | Path, config: ModelConfig) -> None:
        """Load ``tokenizer.json``.

        Raises CheckpointError if it cannot be read, is no byte-level tokenizer, has too few ids, or gives BOS, EOS or
        PAD other ids than `config`.
        """
        path = Path(directory) / "tokenizer.json"
        self._config = config
        try:
            text = path.read_text(encoding="utf-8")
            self._backend = tokenizers.Tokenizer.from_str(text)
            chat = recipe.Tokenizer.from_str(text)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except Exception as error:  # both libraries raise bare Exception
            raise CheckpointError(f"{path}: not a tokenizer file ({error})") from error
        _check(path, self._backend, config)
        released = self._backend.token_to_id(_IMAGE_TOKEN) is not None
        #: Spellings for whoever converts requests: the library's default image token is not the checkpoint's.
        self.special_tokens = recipe.SpecialTokens(image=_IMAGE_TOKEN if released else None)
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(chat)
        self._chat = encoding.with_special_tokens(self.special_tokens)

    @property
    def bos_token_id(self) -> int:
        """Id that starts every prompt."""
        return self._config.bos_token_id

    @property
    def eos_token_id(self) -> int:
        """Id that ends every answer."""
        return self._config.eos_token_id

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows; the tokenizer may have more place holders behind them."""
        return self._config.vocab_size

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are marked special, which plain decoding leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, content in added.items() if content.special)

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Bytes of every id below `vocab_size`; concatenated, they are the UTF-8 of the text."""
        return token_bytes(self._backend, self.vocab_size)

    @cached_property
    def text_bytes(self) -> tuple[bytes, ...]:
        """As `token_bytes`, with nothing for special tokens: the bytes of the text that a user sees."""
        special = self.special_ids
        return tuple(b"" if i in special else piece for i, piece in enumerate(self.token_bytes))

    @cached_property
    def engram_map(self) -> tuple[int, ...] | None:
        """Compressed id of every id below `vocab_size`; None if the model hashes token ids as they are.

        Raises CheckpointError if the map has another size than the configuration says: every hash would change.
        """
        wanted = self._config.engram_compressed_vocab_size
        if wanted is None:
            return None
        mapping = compressed_token_map(self._backend)
        if max(mapping) + 1 != wanted:
            raise CheckpointError(
                f"the token map of tokenizer.json has {max(mapping) + 1} entries;"
                f" text_config.engram_compressed_vocab_size says {wanted}: this is another tokenizer"
            )
        return mapping[: self.vocab_size]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added. Spellings of special tokens become those tokens: `text` is trusted."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain prompt: BOS, then the text."""
        return [self.bos_token_id, *self.encode(text)]

    def encode_conversation(self, conversation: recipe.Conversation) -> list[int]:
        """Ids of a conversation, BOS included, up to where the assistant goes on. What users wrote stays plain text.

        Raises InvalidRequestError if it cannot be rendered, for instance with tools on a vocabulary without them.
        """
        try:
            return self._chat.encode(conversation)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequestError(f"messages cannot be encoded: {error}") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat: all but `thinking` as in the Chat Completions protocol, `effort` as its reasoning effort.

        With the choice "required" the ids end inside an open block of tool calls.
        Raises InvalidRequestError for a malformed message, effort, tool or format.
        """
        body: dict[str, Any] = {
            "model": _RECIPE_MODEL,
            "messages": list(messages),
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if effort is not None:
            body["reasoning_effort"] = effort
        if tools:
            body["tools"] = list(tools)
        if tool_choice is not None:
            body["tool_choice"] = tool_choice
        if response_format is not None:
            body["response_format"] = response_format
        try:
            options = recipe.ConversionOptions().with_special_tokens(self.special_tokens)
            request = recipe.ChatCompletionRequest(body).convert(options)
        except (recipe.ConversionError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"messages are malformed: {error}") from error
        return self.encode_conversation(request.conversation)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        decoder = self.incremental(skip_special_tokens=skip_special_tokens)
        return decoder.push(ids) + decoder.finish()

    def incremental(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A fresh decoder for one stream of ids."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return IncrementalDecoder(self.token_bytes, skipped)


def _check(path: Path, backend: tokenizers.Tokenizer, config: ModelConfig) -> None:
    if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        raise CheckpointError(f"{path}: the decoder is {backend.decoder}, expected ByteLevel")
    size = backend.get_vocab_size(with_added_tokens=True)
    if size < config.vocab_size:
        raise CheckpointError(f"{path}: {size} ids, but vocab_size is {config.vocab_size}")
    for key, spelling in SPECIAL_TOKENS.items():
        found, wanted = backend.token_to_id(spelling), getattr(config, key)
        if found != wanted:
            raise CheckpointError(f"{path}: {spelling} has id {found}, but {key} is {wanted}")
