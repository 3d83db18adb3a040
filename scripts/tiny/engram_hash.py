"""Token map and hash rows of Engram, on the CPU ahead of training (spec 5.1-5.3)."""

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers


def compressed_map(tokenizer: Tokenizer) -> list[int]:
    """Compressed id of every token id; equal normalised texts share one."""
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    first_seen: dict[str, int] = {}
    mapping = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token_id)
        else:
            normal = normalizer.normalize_str(text)
            normal = normal if normal == " " else normal.strip()
            key = normal or text
        mapping.append(first_seen.setdefault(key, len(first_seen)))
    return mapping


def primes_above(start: int, count: int, used: set[int]) -> list[int]:
    """The next `count` primes > start - 1 that are not in `used`, which grows by them."""
    found, candidate = [], start - 1
    while len(found) < count:
        candidate += 1
        if candidate not in used and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
            used.add(candidate)
    return found


class EngramHash:
    """Hash rows of one model: `rows(ids)` for every Engram layer."""

    def __init__(self, text_config: dict, token_map: list[int]):
        self.layers = text_config["engram_layer_ids"]
        self.orders, self.heads = (
            text_config["engram_max_ngram_size"],
            text_config["engram_n_heads"],
        )
        self.map = np.asarray(token_map, dtype=np.int64)
        size = int(self.map.max()) + 1
        if size != text_config["engram_compressed_vocab_size"]:
            raise ValueError(
                f"engram_compressed_vocab_size is {text_config['engram_compressed_vocab_size']}, "
                f"the tokenizer's map has {size} keys"
            )
        bound = max(1, ((2**63 - 1) // size) // 2)
        self.pad = int(self.map[text_config["engram_pad_token_id"]])
        used: set[int] = set()
        self.multipliers, self.primes, self.offsets = {}, {}, {}
        for layer, total in zip(self.layers, text_config["engram_num_embeddings"], strict=True):
            draw = np.random.default_rng(10007 * layer).integers(
                0, bound, size=self.orders, dtype=np.int64
            )
            self.multipliers[layer] = 2 * draw + 1
            primes = [
                p
                for _ in range(self.orders - 1)
                for p in primes_above(text_config["engram_vocab_size"], self.heads, used)
            ]
            if sum(primes) != total:
                raise ValueError(
                    f"engram_num_embeddings of layer {layer} is {total}, the primes sum to {sum(primes)}"
                )
            self.primes[layer] = np.asarray(primes, dtype=np.int64)
            self.offsets[layer] = np.cumsum([0, *primes[:-1]]).astype(np.int64)

    def rows(self, ids: torch.Tensor) -> dict[int, torch.Tensor]:
        """ids [B, S] of sequences that start at position 0 -> per layer, rows [B, S, (orders-1)*heads] int64."""
        compressed = self.map[ids.numpy()]
        result = {}
        for layer in self.layers:
            value = compressed * self.multipliers[layer][0]
            columns = []
            for shift in range(1, self.orders):
                previous = np.full_like(compressed, self.pad)
                previous[:, shift:] = compressed[:, :-shift]
                value = value ^ (previous * self.multipliers[layer][shift])
                columns += [
                    value % self.primes[layer][(shift - 1) * self.heads + head]
                    for head in range(self.heads)
                ]
            result[layer] = torch.from_numpy(np.stack(columns, axis=-1) + self.offsets[layer])
        return result
