"""What a batch remembers about its lines: which are done, which ids were used. Bounded memory for any input."""

import hashlib
import sqlite3

_CHUNK_LINES = 1 << 16
_SQLITE_CACHE_KIB = 32 * 1024


class LineSet:
    """A set of line numbers: one bit a line, in chunks that exist only where a member lies."""

    def __init__(self) -> None:
        self._chunks: dict[int, bytearray] = {}
        self._size = 0

    def add(self, line: int) -> bool:
        """True when the line was not in the set before."""
        chunk, at = divmod(line, _CHUNK_LINES)
        bits = self._chunks.setdefault(chunk, bytearray(_CHUNK_LINES // 8))
        mask = 1 << (at & 7)
        if bits[at >> 3] & mask:
            return False
        bits[at >> 3] |= mask
        self._size += 1
        return True

    def __contains__(self, line: int) -> bool:
        chunk, at = divmod(line, _CHUNK_LINES)
        bits = self._chunks.get(chunk)
        return bits is not None and bool(bits[at >> 3] & (1 << (at & 7)))

    def __len__(self) -> int:
        return self._size


class SeenIds:
    """The custom ids that lines have claimed: 16-byte hashes in a private temporary database that spills to disk."""

    def __init__(self) -> None:
        # An empty name is SQLite's private on-disk database: it vanishes with the connection, whatever ends us.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute(f"PRAGMA cache_size = -{_SQLITE_CACHE_KIB}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("CREATE TABLE ids (hash BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def claim(self, custom_id: str) -> bool:
        """True for the first line with this id, False for every later one."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        return (
            self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (digest,)).rowcount == 1
        )

    def close(self) -> None:
        """Drops the database."""
        self._database.close()
