"""The cluster as its users see it: start it, ask it, shut it down.

    generate()          Cluster (one thread with an event loop)                       ranks
       |--- request --->|  route: choose a prefill and a decode rank with room
                        |--- submit --------------------------------------------> prefill
                        |<-- Offered(handoff) ----------------------------------- prefill
                        |--- submit with handoff -------------------------------> decode   reads, confirms, releases
                        |<-- Tokens, Tokens ... finish_reason ------------------- decode
       |<- Completion --|

``instance`` starts and ends the ranks, ``dispatch`` carries the requests; here is what holds them together.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import ray

from ..transfer.errors import RankError
from ..transfer.request import Completion, Request
from .config import ClusterConfig, checkpoint_dir
from .dispatch import Dispatcher
from .eplb.pools import ExpertPools
from .eplb.watch import Piece
from .instance import Fleet
from .placement import node_list, plan_gangs
from .progress import SilentProgress, StartProgress
from .rank_host import RankBuilder
from .ray_session import RaySession, open_ray

T = TypeVar("T")
_MARGIN_S = 5.0


class Cluster:
    """A running deployment. Use as a context manager, or call ``shutdown`` when done.

    ``generate`` may be awaited from any event loop, by any number of tasks at a time.
    """

    def __init__(self, config: ClusterConfig, session: RaySession, fleet: Fleet) -> None:
        self.config = config
        self._session = session
        self._fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="headrace cluster", daemon=True
        )
        self._thread.start()
        self._dispatcher: Dispatcher | None = None
        self._experts: ExpertPools | None = None
        self._answers: set[Future[Completion]] = set()
        self._closed = False
        atexit.register(self.shutdown)

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        progress: StartProgress | None = None,
        builder: RankBuilder | None = None,
    ) -> "Cluster":
        """Connect to Ray or start it, place the instances, and bring every rank to ready.

        Without a ``builder``, ranks are those of the configured checkpoint.
        Raises ConfigError where the cluster cannot hold the deployment, CheckpointError, RankError or DeadlineError
        naming the first rank that fails. Nothing is left running then.
        """
        progress = progress or SilentProgress()
        session = open_ray(config)
        cluster: Cluster | None = None
        try:
            gangs = plan_gangs(config, node_list(ray.nodes()))
            fleet = Fleet(config, builder, progress)
            cluster = cls(config, session, fleet)
            cluster._run(fleet.start(gangs))
            cluster._run(cluster._serve())
        except BaseException:
            if cluster is None:
                session.close()
            else:
                cluster.shutdown()
            raise
        finally:
            progress.close()
        return cluster

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def checkpoint_dir(self) -> Path:
        """Where tokenizer and model configuration lie on this host."""
        return checkpoint_dir(self.config)

    @property
    def num_actors(self) -> int:
        """Rank actors that were started."""
        return len(self._fleet.ranks)

    def nodes(self) -> dict[str, str]:
        """Rank name -> id of the Ray node on which it runs."""
        return {name: rank.node_id for name, rank in self._fleet.ranks.items()}

    async def generate(self, request: Request) -> Completion:
        """The answer to one request.

        Raises RequestError for a request that cannot be served, TransferError when every prefill of it was lost on
        the way, DeadlineError naming the phase, RankError when a rank died under it. Cancelling the awaiting task frees
        the request everywhere.
        """
        work = self._running().serve(request, time.time())
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._answers.add(future)
        future.add_done_callback(self._answers.discard)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise RankError("the cluster was shut down under the request") from None
            raise

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters and gauges of every living rank, by name."""
        return self._run(self._running().ask("stats"))

    def check_integrity(self) -> None:
        """Raises IntegrityError if the books of any living rank do not balance."""
        self._run(self._running().ask("check_integrity"))

    def eplb_report(self) -> dict[str, Any]:
        """Pool -> where its experts lie, how even the load of its ranks is and what was moved; see ``eplb.report``.

        Pools whose instances have one rank are left out. Raises RankError or DeadlineError where an EPLB actor does not
        answer; the ranks serve on without it.
        """
        return self._run(self._expert_pools().report())

    def expert_series(self, pool: str, since: int = 0) -> list[Piece]:
        """Passes [n] that ranks still know, from ``since`` on, and rows [n, layers, experts]: a pair an instance."""
        return self._run(self._expert_pools().series(pool, since))

    def shutdown(self) -> None:
        """End every rank, give the placement back, and end Ray if it was started here. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        pids = [rank.pid for rank in self._fleet.ranks.values() if rank.pid]
        try:
            self._run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_MARGIN_S)
            for answer in list(self._answers):  # came while the loop was ending
                answer.cancel()
            self._session.close(pids)

    def _running(self) -> Dispatcher:
        if self._closed or self._dispatcher is None:
            raise RankError("the cluster is shut down")
        return self._dispatcher

    def _expert_pools(self) -> ExpertPools:
        if self._closed or self._experts is None:
            raise RankError("the cluster is shut down")
        return self._experts

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` on the cluster's loop and wait; if the waiting is interrupted, the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _serve(self) -> None:
        """Everything that lives on our event loop and needs ranks that are ready."""
        fleet = self._fleet
        self._dispatcher = Dispatcher(self.config, fleet.ranks, fleet.context_tokens)
        kinds = ("prefill", "decode")
        self._experts = ExpertPools(self.config, {kind: fleet.instances(kind) for kind in kinds})

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_MARGIN_S)
        if self._experts is not None:
            await self._experts.close()
        await self._fleet.stop()
