"""Token ids to text, piece by piece, without ever showing half a character."""

import codecs
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import tokenizers


class IncrementalDecoder:
    """Text of a growing stream of ids.

    A byte-level token may end inside a character; its bytes are held back until the character is whole. The pieces
    joined equal the text of all ids decoded at once.
    """

    def __init__(self, pieces: Sequence[bytes], skipped: AbstractSet[int]) -> None:
        """pieces: bytes of every id. skipped: ids that yield no text."""
        self._pieces = pieces
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that became whole, possibly none."""
        wanted = (self._pieces[token] for token in ids if token not in self._skipped)
        return self._utf8.decode(b"".join(wanted))

    def finish(self) -> str:
        """End the stream: what is held back is no character and comes out as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def token_bytes(backend: tokenizers.Tokenizer, num_tokens: int) -> tuple[bytes, ...]:
    """Bytes of ids 0 .. num_tokens - 1 of a byte-level tokenizer; an id without a token has none."""
    table = _byte_of_char()
    return tuple(_bytes(backend.id_to_token(token) or "", table) for token in range(num_tokens))


def _bytes(spelling: str, table: dict[str, int]) -> bytes:
    """A vocabulary string stands for bytes; an added token with other characters stands for itself."""
    if all(char in table for char in spelling):
        return bytes(table[char] for char in spelling)
    return spelling.encode()


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
