"""One rank of an instance, for tests: ``run_rank`` says what happens over a pipe and returns an exit status.

Tasks: ``rounds`` exchanges random parts and checks every one; ``serve`` exchanges until that fails; ``join`` joins;
``other`` makes one call of another width on rank 0; ``late`` has rank 0 come too late to a gather.
"""

import random
import sys
import threading
import time
from collections.abc import Callable

import torch

from headrace.model.exchange import join_exchange
from headrace.model.exchange_shared import MAILBOX_BYTES
from headrace.model.parallel import ExpertExchange
from headrace.transfer.errors import HeadraceError

ROUNDS = 40
DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.int64)
WIDTHS = (1, 7, 64, 333)


def parts_of(round_number: int, sender: int, size: int) -> list[torch.Tensor]:
    """What ``sender`` sends in a round: the same in every process that asks."""
    draw = random.Random(round_number)
    dtype, width = draw.choice(DTYPES), draw.choice(WIDTHS)
    # every eighth round is of several mailboxes
    most = 3 * MAILBOX_BYTES // (width * dtype.itemsize) if round_number % 8 == 7 else 9
    draw = random.Random(round_number * 97 + sender)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    counts = [draw.choice((0, 0, 1, 2, draw.randint(0, most))) for _ in range(size)]
    return [
        torch.randint(0, 256, (count, width * dtype.itemsize), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        for count in counts
    ]


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return (
        x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
    )


def check_rounds(exchange: ExpertExchange, rounds: int = ROUNDS) -> None:
    """Exchange while another thread gathers; compare with what each rank must have sent."""
    wrong: list[str] = []

    def gather() -> None:
        try:
            for number in range(3 * rounds):
                expected = [[float(rank), float(number)] for rank in range(exchange.size)]
                if exchange.gather([exchange.rank, number]) != expected:
                    wrong.append(f"gather {number}")
        except HeadraceError as error:
            wrong.append(str(error))

    thread = threading.Thread(target=gather)
    thread.start()
    for number in range(rounds):
        sent = parts_of(number, exchange.rank, exchange.size)
        arrival = exchange.start(sent)
        expected = [
            parts_of(number, sender, exchange.size)[exchange.rank]
            for sender in range(exchange.size)
        ]
        received = arrival.wait()
        assert len(received) == exchange.size
        for sender, (got, want) in enumerate(zip(received, expected, strict=True)):
            assert same_bits(got, want), (number, sender)
    thread.join()
    assert not wrong, wrong


def serve(exchange: ExpertExchange) -> None:
    for number in range(1_000_000):
        exchange.all_to_all(parts_of(number % 7, exchange.rank, exchange.size))


def run_rank(
    say: Callable[[str], None],
    kind: str,
    address: str,
    rank: int,
    size: int,
    task: str,
    host: str | None = None,
) -> int:
    """0, or 3 after an error of ours, which is said."""
    torch.set_num_threads(1)
    limit = {"join": 1.0, "other": 5.0, "late": 0.5}.get(task, 60.0)
    try:
        exchange = join_exchange(kind, address, rank, size, limit, host)
        say(type(exchange).__name__)
        if task == "rounds":
            check_rounds(exchange)
        elif task == "serve":
            serve(exchange)
        elif task == "other":
            exchange.all_to_all([torch.zeros(2, 3 if rank else 4)] * size)
        elif task == "late":
            exchange.gather([1.0])
            if rank == 0:
                time.sleep(1.5)
            exchange.gather([2.0])  # rank 1 wrote its own before it gave up
            exchange.gather([3.0])
        exchange.close()
    except HeadraceError as error:
        say(f"{type(error).__name__} {error}")
        return 3
    return 0


if (
    "RANK" in globals()
):  # run by a process of the tests, which has put a pipe and the arguments here
    pipe, arguments = globals()["RANK"]
    sys.exit(run_rank(pipe.send, *arguments))
