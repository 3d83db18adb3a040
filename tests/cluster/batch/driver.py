"""A batch driver in a process of its own, for a test to kill: ``driver.py IN OUT`` against a fake cluster."""

import asyncio
import random
import sys
from pathlib import Path

from headrace.cluster.batch.command import drive
from headrace.cluster.batch.fakes import ByteCodec, EchoGenerator
from headrace.cluster.batch.job import BatchJob
from headrace.cluster.batch.runner import Runner, RunnerConfig
from headrace.cluster.batch.source import Source
from headrace.cluster.batch.target import Target
from headrace.transfer.request import Completion, Request


class UnevenGenerator(EchoGenerator):
    """Answers out of order."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(random.uniform(0.001, 0.01))
        return await super().generate(request)


def main(source: str, output: str) -> None:
    codec = ByteCodec()
    with BatchJob(Source(source), Target.of(output, Path()), {"model": "fake"}) as job:

        def answer() -> Runner:
            runner = job.runner(RunnerConfig(concurrency=8, model="fake"), UnevenGenerator(), codec)
            asyncio.run(job.answer(runner, codec, 10_000))
            return runner

        drive(job, answer, ordered=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
