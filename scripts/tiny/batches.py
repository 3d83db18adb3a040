"""Token stream of the training split and the rows of every step."""

import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from . import corpus

BLOCK = 1024  # tokens shuffled as one piece; shorter rows are equal cuts of a block
BOS_ID, EOS_ID = 0, 1


def token_stream(tokenizer: Tokenizer, seed: int) -> np.ndarray:
    """Training files (BOS text EOS) and chat samples in random order, as one uint16 array."""
    training, _ = corpus.split(corpus.read_standard_library())
    texts = [document.text for document in training]
    encoded = [
        [BOS_ID, *e.ids, EOS_ID] for e in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
    encoded += [
        e.ids
        for e in tokenizer.encode_batch(
            corpus.chat_samples(training, seed), add_special_tokens=False
        )
    ]
    random.Random(seed).shuffle(encoded)
    return np.concatenate([np.asarray(ids, dtype=np.uint16) for ids in encoded])


def cached_stream(path: Path, tokenizer: Tokenizer, seed: int) -> np.ndarray:
    """`token_stream`, kept in a file between runs."""
    if not path.exists():
        np.save(path, token_stream(tokenizer, seed))
    return np.load(path)


class Batches:
    """Rows without replacement, epoch after epoch. A row starts with BOS in place of what came before it."""

    def __init__(self, stream: np.ndarray, seed: int):
        self.blocks = stream[: len(stream) // BLOCK * BLOCK].reshape(-1, BLOCK)
        self.seed, self.position = seed, 0

    def next(self, tokens: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), both [tokens/length, length] int64. `tokens` is a multiple of BLOCK."""
        picks = []
        for _ in range(tokens // BLOCK):
            epoch, offset = divmod(self.position, len(self.blocks))
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.blocks))
            picks.append(self.blocks[order[offset]])
            self.position += 1
        targets = torch.from_numpy(np.stack(picks).astype(np.int64)).view(-1, length)
        inputs = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=BOS_ID)
        return inputs, targets
