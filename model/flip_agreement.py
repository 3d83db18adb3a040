"""What the ranks of an instance tell each other about a move of experts, and what follows from it. Pure.

Every turn each rank tells four numbers, all 0 while nothing moves. All ranks see the same ones and conclude the same,
so they change a layer at the same place among their passes, and drop a plan in the same turn:

    rank 0   | epoch 8, digest d, staged 3, gives up 0 |
    rank 1   | epoch 8, digest d, staged 5, gives up 0 |   --> the first 3 changed layers of plan 8 may be in force
    rank 2   | epoch 8, digest d, staged 3, gives up 0 |

A rank tells ``staged`` = n once everything that it reads for the first n changed layers is here. So no rank overwrites
a slot that another may still read for that layer. It tells NOT_READY until nothing of an earlier plan is on its way
(reads into its staging rows, flips on its stream); no rank reads before all are ready, so none reads a slot that an
earlier plan is about to overwrite. Plans of one epoch that are not the same plan have different digests, and never
come into force.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NOT_READY = -1


@dataclass(frozen=True, slots=True)
class Told:
    """``epoch`` and ``digest`` of the plan under way, or 0; layers of it ``staged``; the epoch we give up, or 0."""

    epoch: int = 0
    digest: int = 0
    staged: int = NOT_READY
    gives_up: int = 0

    def numbers(self) -> tuple[float, ...]:
        """For the gather; exact up to 2^53."""
        ready = self.staged - NOT_READY
        return float(self.epoch), float(self.digest), float(ready), float(self.gives_up)


NOTHING = Told().numbers()
"""What a rank tells when nothing moves."""
NUM_TOLD = len(NOTHING)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The first ``layers`` changed layers of plan ``epoch`` may be in force; plans up to ``gives_up`` are dropped.

    ``epoch`` is 0 and ``layers`` NOT_READY unless every rank has that very plan and is ready for it.
    """

    epoch: int
    layers: int
    gives_up: int


def agree(told: Sequence[Sequence[float]]) -> Agreed:
    """What follows from the numbers of all ranks; the same on each of them."""
    plans = {(int(numbers[0]), int(numbers[1])) for numbers in told}
    staged = min(int(numbers[2]) for numbers in told) + NOT_READY
    gives_up = max(int(numbers[3]) for numbers in told)
    epoch = plans.pop()[0] if len(plans) == 1 else 0
    if epoch <= gives_up or staged == NOT_READY:
        return Agreed(0, NOT_READY, gives_up)
    return Agreed(epoch, staged, gives_up)
