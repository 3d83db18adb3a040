"""One rank of an instance of processes that moves experts over NIXL.

``moving_rank.py ADDRESS RANK SIZE FOLDER`` leaves its arena and what its mover tells in the folder.
"""

import random
import sys
import time
from pathlib import Path

import torch

from headrace.model.exchange import join_exchange
from headrace.model.expert_plan import ExpertPlan
from headrace.model.expert_reads import SLOT_BYTES, expert_layout
from headrace.model.placement import ExpertPlacement
from headrace.model.rebalance import ExpertMover
from headrace.tests.model.moving import StoreNetwork, checksums_of, random_placement
from headrace.transfer.backend import Arenas
from headrace.transfer.nixl import NixlBackend

WAIT_S = 30.0
LAYERS, EXPERTS, SLOTS = 4, 6, 5


def placement(number: int, ranks: int) -> ExpertPlacement:
    """Number 0 is where experts are at first, number 1 where they go."""
    return random_placement(
        random.Random(number), layers=LAYERS, num_experts=EXPERTS, ranks=ranks, slots=SLOTS
    )


def swap_pairings(folder: Path, rank: int, size: int, backend: NixlBackend) -> None:
    """Leave our pairing in the folder and connect to those of the others."""
    ready = folder / f"{rank}.tmp"
    ready.write_bytes(backend.pairing())
    ready.rename(folder / f"{rank}.pairing")
    deadline = time.monotonic() + WAIT_S
    for other in set(range(size)) - {rank}:
        while not (path := folder / f"{other}.pairing").exists():
            assert time.monotonic() < deadline, f"rank {other} does not come"
            time.sleep(0.01)
        backend.connect(path.read_bytes())


def main(address: str, rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    exchange = join_exchange("auto", address, rank, size, WAIT_S)
    start, wanted = placement(0, size), placement(1, size)
    network = StoreNetwork(start, rank)
    store = network.expert_store
    layout = expert_layout("test", store.expert_bytes)
    slots = torch.zeros((1, SLOT_BYTES), dtype=torch.uint8)
    names = [f"decode-0.{number}.experts" for number in range(size)]
    arenas = Arenas(layout=layout, blocks=store.arena, slots=slots)
    backend = NixlBackend(names[rank], arenas)
    swap_pairings(folder, rank, size, backend)
    mover = ExpertMover(network, backend, names, rank, bandwidth=1e9, deadline_s=WAIT_S)
    sums = checksums_of(start, store.expert_bytes)
    mover.offer(ExpertPlan(epoch=1, placement=wanted, checksums=sums))
    deadline = time.monotonic() + WAIT_S
    is_moving = True
    while is_moving:
        assert time.monotonic() < deadline, mover.state()
        mover.poll()
        flips = mover.heed(exchange.gather(mover.told))
        for flip in flips:
            flip()
        if flips:
            network.run_pass()
        is_moving = any(told[0] for told in exchange.gather([float(mover.is_moving)]))
    exchange.gather([0.0])  # nobody reads from us any more
    torch.save((store.arena, mover.state()), folder / f"{rank}.pt")
    backend.close()
    exchange.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
