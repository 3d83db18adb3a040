"""A batch job from its files' point of view: opened or gone on with, answered, sorted, delivered."""

from collections.abc import Iterator

from ..eplb.watch import ExpertWatch
from .bookkeeping import LineSet, SeenIds
from .codec import TextCodec
from .journal import Identity, Journal
from .lines import BadLine
from .output import OutputFile, recover, sort_by_line
from .preparation import Prepared, prepare
from .progress import shown
from .records import DUPLICATE, Outcome
from .report import Totals
from .runner import Generator, Runner, RunnerConfig
from .source import Source
from .storage import upload
from .target import Target


class BatchJob:
    """An opened job: its journal is locked, its output holds only good lines, its counts are those of earlier runs.

    Use it as a context manager. Raises ConfigError for an output that belongs to another job or driver.
    """

    def __init__(self, source: Source, target: Target, model_identity: Identity) -> None:
        self.source = source
        self.target = target
        self.totals = Totals()
        identity = {f"input_{key}": value for key, value in source.identity.items()} | dict(
            model_identity
        )
        self.journal = Journal.open(target.path, identity)
        self._done = LineSet()
        self._seen = SeenIds()
        try:
            self.bytes_cut = recover(target.path, self._accept)
            self._output = OutputFile(target.path)
        except BaseException:
            self._seen.close()
            self.journal.close()
            raise

    def _accept(self, outcome: Outcome) -> bool:
        if not self._done.add(outcome.line):
            return False
        if outcome.custom_id is not None and outcome.error_code != DUPLICATE:
            self._seen.claim(outcome.custom_id)
        self.totals.add(outcome)
        return True

    def is_complete(self) -> bool:
        """True when every line of the input has its line of output; reads the input up to the first that has not."""
        return all(line.number in self._done for line in self.source.lines())

    def runner(self, config: RunnerConfig, generator: Generator, codec: TextCodec) -> Runner:
        """The driver for what is left."""
        return Runner(
            config, generator, codec, self._output, job_id=self.journal.job_id, whole=self.totals
        )

    def lines(self, codec: TextCodec, context_tokens: int) -> Iterator[Prepared | BadLine]:
        """What is left to do."""
        return prepare(
            self.source,
            self._done,
            self._seen,
            codec,
            job_id=self.journal.job_id,
            context_tokens=context_tokens,
        )

    async def answer(
        self,
        runner: Runner,
        codec: TextCodec,
        context_tokens: int,
        watch: ExpertWatch | None = None,
    ) -> None:
        """Runs to the end, with progress on standard error, the balance of experts too where ``watch`` looks at it.

        Raises BatchStoppedError when the cluster has died.
        """
        async with shown(runner, self.source.num_lines, watch):
            await runner.run(self.lines(codec, context_tokens))

    def deliver(self, *, ordered: bool) -> None:
        """Makes a complete output durable, sorts it on request and copies it where it belongs."""
        self._output.sync()
        if ordered:
            sort_by_line(self.target.path)
        if self.target.uri is not None:
            upload(self.target.path, self.target.uri)

    def __enter__(self) -> "BatchJob":
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._seen.close()
        self.journal.close()
