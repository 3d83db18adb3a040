"""Writers to one disk store, each a process of its own: they are forked here, so that a test pays for imports once.

python disk_process.py FOLDER
start FIRST STEP COUNT CAPACITY_BYTES  -> process id of a writer that has opened the store and begins
wait                                   -> exit statuses of all that have not been waited for, ended by a signal or not
"""

import os
import sys
from pathlib import Path

from headrace.tests.transfer.layouts import SMALL
from headrace.tests.transfer.tiers.stored import read, record_of
from headrace.transfer.tiers.disk import DiskStore
from headrace.transfer.tiers.eviction import make_policy


def write(folder: Path, first: int, step: int, count: int, capacity: int) -> None:
    store = DiskStore(folder, layout=SMALL, capacity_bytes=capacity, policy=make_policy("lru"))
    for turn in range(count):
        number = first + step * turn
        store.write(record_of(number))
        if turn % 5 == 0:
            read(store, [number, max(0, number - 3 * step)])
        if turn % 20 == 0:
            store.refresh()
    store.close()


def main(folder: Path) -> None:
    running: list[int] = []
    for line in sys.stdin:
        command, *values = line.split()
        if command == "start":
            process = os.fork()
            if not process:
                status = 1
                try:
                    write(folder, *map(int, values))
                    status = 0
                finally:
                    os._exit(status)
            running.append(process)
            answer = str(process)
        else:
            answer = " ".join(str(os.waitpid(process, 0)[1]) for process in running)
            running.clear()
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


main(Path(sys.argv[1]))
