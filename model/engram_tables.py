"""Engram's integer constants: primes, multipliers, row offsets, and the compressed token map.

They are part of the model although no tensor holds them; the checkpoint's table sizes are sums of these primes.
Source: spec model.md sections 5.1 and 5.2, vectors in section 13.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

if TYPE_CHECKING:
    from .config import ModelConfig

_SEED_FACTOR = 10007
_LONE_SPACE = "\ue000"
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class EngramTable:
    """Constants of the Engram module of one layer; columns are ordered by n-gram size, then head.

    multipliers: one per n-gram place, own token first. primes, offsets: one per column; column c of a token reads row
    ``hash % primes[c] + offsets[c]`` of the layer's table.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return sum(self.primes)


def engram_tables(config: "ModelConfig") -> dict[int, EngramTable]:
    """Constants of every Engram layer of `config`, by layer id."""
    primes = engram_primes(
        len(config.engram_layer_ids), config.engram_vocab_size, config.engram_columns
    )
    tables: dict[int, EngramTable] = {}
    for layer, own in zip(config.engram_layer_ids, primes, strict=True):
        multipliers = engram_multipliers(
            layer, config.engram_hash_vocab, config.engram_max_ngram_size
        )
        tables[layer] = EngramTable(multipliers, own, tuple(accumulate(own[:-1], initial=0)))
    return tables


def engram_primes(num_layers: int, start: int, num_columns: int) -> list[tuple[int, ...]]:
    """Distinct ascending primes from `start` on, `num_columns` a layer.

    Each (layer, n-gram size) searches from `start` and skips what an earlier search took, so the order is plain.
    """
    found = _primes_from(start)
    return [tuple(next(found) for _ in range(num_columns)) for _ in range(num_layers)]


def engram_multipliers(layer: int, hash_vocab: int, num_places: int) -> tuple[int, ...]:
    """Odd multipliers of `layer`, one per n-gram place, so small that ``id * multiplier`` fits int64."""
    bound = max(1, (2**63 - 1) // hash_vocab // 2)
    draws = np.random.default_rng(_SEED_FACTOR * layer).integers(
        0, bound, size=num_places, dtype=np.int64
    )
    return tuple(2 * int(draw) + 1 for draw in draws)


def compressed_token_map(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Compressed id of every token id: equal for tokens that read alike but for case, accents, width and spaces.

    Build it from the tokenizer as shipped; the number of distinct ids is ``max(result) + 1``.
    """
    normalize = _normalizer()
    seen: dict[str, int] = {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return tuple(
        seen.setdefault(_key(tokenizer, normalize, token), len(seen)) for token in range(size)
    )


def _key(tokenizer: Tokenizer, normalize: normalizers.Normalizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if _REPLACEMENT in text:
        return tokenizer.id_to_token(token) or ""
    return normalize.normalize_str(text) or text


def _normalizer() -> normalizers.Normalizer:
    steps: Sequence[normalizers.Normalizer] = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
    return normalizers.Sequence(list(steps))


def _primes_from(start: int) -> Iterator[int]:
    return (number for number in count(max(start, 2)) if _is_prime(number))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
