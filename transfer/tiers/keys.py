"""Names of blocks by their content: 16 bytes that stand for everything the global KV of a block depends on.

root    model, KV format, block size, how windows are rebuilt after a hit, the tenant's salt
key 0 = hash(root, tokens of block 0)
key 1 = hash(key 0, tokens of block 1)        so equal keys mean equal prefixes
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from ..layout import CacheLayout

KEY_BYTES = 16


def root_key(layout: CacheLayout, *, replay: str, salt: str = "") -> bytes:
    """What all keys of one model and tenant begin with; nobody who lacks ``salt`` can make or guess one of them."""
    parts = (layout.model_fingerprint, layout.kv_format, str(layout.block_tokens), replay, salt)
    made = blake2b(digest_size=KEY_BYTES, person=b"headrace root 1")
    for part in parts:
        data = part.encode()
        made.update(len(data).to_bytes(4, "little"))
        made.update(data)
    return made.digest()


def block_keys(root: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """A key for every whole block of ``token_ids``, which are below 2**32; a partial last block has none."""
    count = len(token_ids) // block_tokens
    data = np.fromiter(token_ids, np.uint32, len(token_ids))[: count * block_tokens].tobytes()
    size = 4 * block_tokens
    return list(_chain(root, (data[n * size : (n + 1) * size] for n in range(count))))


def _chain(key: bytes, blocks: Iterable[bytes]) -> Iterable[bytes]:
    for block in blocks:
        key = blake2b(block, digest_size=KEY_BYTES, key=key).digest()
        yield key
