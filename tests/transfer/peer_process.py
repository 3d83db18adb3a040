"""A rank in a process of its own, for tests: it answers its peers' messages and obeys its test.

It echoes every message, and answers ConfirmLease from a real lease table. Processes come from a fork server that has
imported everything but NIXL, which must not be forked.
"""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from headrace.tests.transfer.layouts import make_arenas
from headrace.transfer.codec import decode, encode
from headrace.transfer.layout import CacheLayout
from headrace.transfer.lease import Held, LeaseTable
from headrace.transfer.messages import ConfirmLease, LeaseAlive, LeaseGone
from headrace.transfer.nixl import NixlBackend
from headrace.transfer.nixl_options import NixlOptions
from headrace.transfer.plan import Copy

WAIT_S = 30.0
NUM_BLOCKS = 4


def serve(
    pipe: Connection,
    name: str,
    layout: CacheLayout,
    seed: int,
    options: NixlOptions,
) -> None:
    """Body of the process: one loop over the test's commands and the peers' messages."""
    torch.set_num_threads(1)
    os.environ.update(options.environment())
    arenas = make_arenas(layout, NUM_BLOCKS, 4, seed)
    backend = NixlBackend(name, arenas, options)
    leases = LeaseTable(backend.incarnation)
    pipe.send(backend.pairing())
    victim: str | None = None
    while True:
        if victim is not None:
            read = backend.start_read(victim, [Copy("blocks", 0, 0, arenas.blocks.numel())])
            while not read.poll():
                pass
        if pipe.poll():
            command, argument = pipe.recv()
            if command == "stop":
                backend.close()
                return
            if command == "connect":
                pipe.send(backend.connect(argument))
            elif command == "grant":
                held = leases.grant("r1", 1, (0,), 0, time.monotonic(), argument)
                pipe.send((held.lease_id, backend.incarnation))
            elif command == "read for ever":
                victim = argument
                pipe.send("reading")
            elif command == "scribble":
                arenas.blocks.bitwise_not_()
                pipe.send("done")
        for peer, data in backend.receive():
            backend.send(peer, answer(leases, data))
        time.sleep(0.0002)


def answer(leases: LeaseTable, data: bytes) -> bytes:
    """The echo, or the verdict on a lease."""
    if not data.startswith(b"\x93\x02\x02"):
        return data
    ask = decode(data)
    assert isinstance(ask, ConfirmLease)
    state = leases.confirm(
        ask.lease_id, ask.incarnation, ask.request_id, ask.generation, time.monotonic()
    )
    if isinstance(state, Held):
        return encode(LeaseAlive(lease_id=ask.lease_id, nonce=ask.nonce))
    return encode(LeaseGone(lease_id=ask.lease_id, nonce=ask.nonce, reason=state.reason))


class PeerProcess:
    """The test's end of such a rank."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        name: str = "prefill-0",
        seed: int = 7,
        options: NixlOptions | None = None,
    ) -> None:
        self.options = options or NixlOptions()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=serve,
            args=(theirs, name, layout, seed, self.options),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.pairing: bytes = self.result()
        self.expected = make_arenas(layout, NUM_BLOCKS, 4, seed)

    def ask(self, command: str, argument: object = None):
        """Send a command and return its result."""
        self.pipe.send((command, argument))
        return self.result()

    def result(self):
        """The next thing that the process says."""
        assert self.pipe.poll(WAIT_S), "the peer process says nothing"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        """Deliver a signal to exactly this process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join(WAIT_S)

    def stop(self) -> None:
        """Close in order, or by force."""
        with suppress(OSError):  # a process that a test has just killed may still count as alive
            self.pipe.send(("stop", None))
            self.process.join(5)
        self.kill()
        self.pipe.close()
