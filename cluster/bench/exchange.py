"""``headrace bench exchange``: the expert exchange of one instance over shared memory against gloo.

Every rank is a process of this host with one thread. Both transports join before the first call and take turns in every
round, so that a busy machine slows both alike. ``rows`` is what each rank sends to each rank, ``width`` the bytes of a
row. Times are those of rank 0, from the call to the rows of all others; figures are medians of all calls.
Where the ranks are more than the processors, a call waits for each of them to get its turn.
"""

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ...model.exchange import join_exchange
from ...transfer.errors import ConfigError, DeadlineError, HeadraceError, RankError
from .processor import processor

KINDS = ("gloo", "shared_memory")
DEFAULT_RANKS = (2, 4)
DEFAULT_ROWS = (1, 8, 64, 512)
DEFAULT_WIDTHS = (512, 4096)
MAX_RANKS = 32
_LARGEST = 64 << 20
_WAIT_S = 300.0
_STEP_S = 60.0
_CALL_BYTES = 4 << 20  # a turn makes fewer calls where they are large
_CALLS, _FEW_CALLS = 20, 3
_GATHERED = (1.0, 0.0, 0.0, 0.0)

Case = tuple[int, int] | None
"""Rows and width of an exchange; None is a gather."""
Times = dict[tuple[Case, str], list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    for name, default, text in (
        ("--ranks", DEFAULT_RANKS, "sizes of the instance"),
        ("--rows", DEFAULT_ROWS, "rows from each rank to each rank"),
        ("--widths", DEFAULT_WIDTHS, "bytes of a row"),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(
            name,
            nargs="+",
            type=int,
            default=list(default),
            metavar="N",
            help=f"{text} ({shown})",
        )
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object] | None:
    """Measure; return the document with ``--json``, else print a table."""
    for option, values, least, most in (
        ("--ranks", args.ranks, 2, MAX_RANKS),
        ("--rows", args.rows, 0, _LARGEST),
        ("--widths", args.widths, 1, _LARGEST),
        ("--repeats", [args.repeats], 1, 10_000),
    ):
        for value in values:
            if not least <= value <= most:
                raise ConfigError(f"{option} {value} is not allowed: {least} to {most}")
    if max(args.rows) * max(args.widths) > _LARGEST:
        raise ConfigError(
            f"--rows {max(args.rows)} of --widths {max(args.widths)} are not allowed: a part has at most "
            f"{_LARGEST} bytes"
        )
    document = measure(args.ranks, args.rows, args.widths, args.repeats)
    if args.json:
        return document
    _print(document)
    return None


def measure(
    ranks: Sequence[int], rows: Sequence[int], widths: Sequence[int], repeats: int
) -> dict[str, object]:
    """One warm-up round and ``repeats`` timed ones over all cases, for each size of the instance.

    Raises RankError when a rank fails, DeadlineError when the first falls silent.
    """
    started = time.time()
    cases: list[Case] = [None, *((number, width) for width in widths for number in rows)]
    results = [
        _summary(size, case, times)
        for size in ranks
        for times in [_instance(size, cases, repeats)]
        for case in cases
    ]
    versions = {name: importlib.metadata.version(name) for name in ("headrace", "torch", "numba")}
    environment = {
        **versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "num_cpus": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "repeats": repeats,
        "started": round(started, 3),
        "seconds": round(time.time() - started, 3),
    }
    return {"environment": environment, "results": results}


def _summary(size: int, case: Case, times: Times) -> dict[str, object]:
    gloo, shared = (statistics.median(times[case, kind]) * 1e6 for kind in KINDS)
    return {
        "call": "gather" if case is None else "all_to_all",
        "ranks": size,
        "rows": None if case is None else case[0],
        "width": None if case is None else case[1],
        "gloo_us": round(gloo, 1),
        "shared_memory_us": round(shared, 1),
        "gloo_over_shared_memory": round(gloo / shared, 2),
    }


def _instance(size: int, cases: Sequence[Case], repeats: int) -> Times:
    """Seconds of every timed call of rank 0 in an instance of ``size`` processes."""
    context = multiprocessing.get_context("spawn")
    addresses = {kind: _free_address() for kind in KINDS}
    pipe, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(
            target=_rank, args=(theirs, addresses, rank, size, cases, repeats), daemon=True
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        theirs.close()
        if not pipe.poll(_WAIT_S):
            raise DeadlineError(f"bench of {size} ranks: nothing heard for {_WAIT_S:g} s")
        found = pipe.recv()
    except EOFError as error:
        raise RankError(f"bench of {size} ranks: every rank ended without a result") from error
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if isinstance(found, str):
        raise RankError(found)
    return found


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _rank(
    pipe: Connection,
    addresses: dict[str, str],
    rank: int,
    size: int,
    cases: Sequence[Case],
    repeats: int,
) -> None:
    """Body of a rank: makes all calls; rank 0 sends what they took, any rank what went wrong."""
    torch.set_num_threads(1)
    try:
        exchanges = {
            kind: join_exchange(kind, addresses[kind], rank, size, _STEP_S) for kind in KINDS
        }
        times: Times = {(case, kind): [] for case in cases for kind in KINDS}
        parts = {case: [torch.zeros(case, dtype=torch.uint8)] * size for case in cases if case}
        for repeat in range(repeats + 1):
            for case in cases:
                for kind, exchange in exchanges.items():
                    number = _number_of_calls(case, size)
                    if case is None:
                        found = _timed(lambda at=exchange: at.gather(_GATHERED), number)
                    else:
                        sent = parts[case]
                        found = _timed(lambda at=exchange, p=sent: at.all_to_all(p), number)
                    if repeat:
                        times[case, kind] += found
        if rank == 0:
            pipe.send(times)
        exchanges["gloo"].gather(_GATHERED)
    except HeadraceError as error:
        pipe.send(str(error))


def _number_of_calls(case: Case, size: int) -> int:
    if case is None or case[0] * case[1] * size * size <= _CALL_BYTES:
        return _CALLS
    return _FEW_CALLS


def _timed(call: Callable[[], object], number: int) -> list[float]:
    found: list[float] = []
    for _ in range(number):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def _print(document: dict[str, Any]) -> None:
    table = Table(title="expert exchange: medians, microseconds a call")
    for heading in ("call", "ranks", "rows", "width", "gloo", "shared memory", "gloo / shared"):
        table.add_column(heading, justify="right")
    for row in document["results"]:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)
