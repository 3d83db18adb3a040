"""Traces of real requests as sequences of block ids: who shares which prefix with whom.

    Mooncake        one request a line: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks
    agent sessions  one session a line: requests with t (s), input_length, output_length, hash_runs of 64-token blocks

Both may be gzipped. Ids are made to stand for BLOCK_TOKENS tokens: equal ids mean equal prefixes up to there.
"""

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...transfer.errors import ConfigError

BLOCK_TOKENS = 128
_MOONCAKE_TOKENS = 512
_SESSIONS_OVER_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """``blocks`` are the ids of the whole blocks of a prompt of ``input_tokens`` that came ``at_s`` seconds in."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace in order of time, at most ``limit``. Raises ConfigError naming file and line.

    Sessions have no times of their own: they begin at random instants, the same in every run, over an hour.
    """
    requests: list[TraceRequest] = []
    starts = random.Random(0)
    for number, line in enumerate(_lines(path), start=1):
        try:
            if "requests" in line:
                begin = starts.uniform(0.0, _SESSIONS_OVER_S)
                requests += _session(line, number, begin)
            else:
                requests.append(_mooncake(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} line {number} is no request of a trace ({type(error).__name__}: {error}): give a Mooncake"
                " trace (hash_ids) or agent sessions (requests with hash_runs)"
            ) from error
    if not requests:
        raise ConfigError(f"{path} holds no request")
    requests.sort(key=lambda request: request.at_s)
    return requests[:limit]


def make_chats(users: int, turns: int, seed: int = 0) -> list[TraceRequest]:
    """Conversations that share a few system prompts: each turn repeats all that was said."""
    rng = random.Random(seed)
    fresh = iter(range(1 << 40))
    systems = [tuple(next(fresh) for _ in range(rng.randrange(4, 40))) for _ in range(5)]
    requests: list[TraceRequest] = []
    for _ in range(users):
        at_s, said = rng.uniform(0, 3600.0), rng.choice(systems)
        for _ in range(rng.randint(1, turns)):
            said += tuple(next(fresh) for _ in range(rng.randrange(1, 12)))
            tokens = len(said) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
            requests.append(
                TraceRequest(at_s=at_s, input_tokens=tokens, output_tokens=200, blocks=said)
            )
            at_s += rng.expovariate(1 / 60.0)
    return sorted(requests, key=lambda request: request.at_s)


def _mooncake(line: Mapping[str, Any]) -> TraceRequest:
    tokens = int(line["input_length"])
    parts = _MOONCAKE_TOKENS // BLOCK_TOKENS
    blocks = [parts * int(number) + part for number in line["hash_ids"] for part in range(parts)]
    return TraceRequest(
        at_s=float(line["timestamp"]) / 1e3,
        input_tokens=tokens,
        output_tokens=int(line["output_length"]),
        blocks=tuple(blocks[: tokens // BLOCK_TOKENS]),
    )


def _session(line: Mapping[str, Any], number: int, begin: float) -> Iterator[TraceRequest]:
    each = BLOCK_TOKENS // int(line["block_size"])
    for request in cast("Sequence[Mapping[str, Any]]", line["requests"]):
        ids = [first + n for first, count in request["hash_runs"] for n in range(count)]
        whole = ids[each - 1 :: each]
        tokens = int(request["input_length"])
        yield TraceRequest(
            at_s=begin + float(request["t"]),
            input_tokens=tokens,
            output_tokens=int(request["output_length"]),
            blocks=tuple((number << 40) + each_id for each_id in whole[: tokens // BLOCK_TOKENS]),
        )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                found: object = json.loads(text)
                if not isinstance(found, dict):
                    raise ConfigError(f"{path} line {number} is not a JSON object")
                yield cast("dict[str, Any]", found)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} line {number + 1} is not JSON: {error}") from error
