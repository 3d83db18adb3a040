"""What a prefill rank reports. Apart from the rank, so that whoever only listens needs no torch."""

from dataclasses import dataclass

from ..transfer.errors import HeadraceError
from ..transfer.messages import Handoff
from ..transfer.request import PromptLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A prompt is prefilled and may be read. ``prefill_started`` and ``offered`` are instants of its timeline.

    ``num_cached`` tokens of the prompt came from the cache. ``prompt_logprobs`` are those of ``Completion``.
    """

    request_id: str
    handoff: Handoff
    prefill_started: float
    offered: float
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    num_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFailed:
    """A prompt is given up; nothing of it is left here."""

    request_id: str
    error: HeadraceError


PrefillEvent = Offered | PrefillFailed
