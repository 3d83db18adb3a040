"""The named instants of a request, from which every latency figure is derived.

    arrived   routed   prefill_started   offered   admitted   first_token        last_token
       |---------|-----------|--------------|----------|-----------|-- ... ----------|
       |  route  |   queue   |   prefill    | transfer |first step |     decode      |
       |<------------------------- TTFT ------------------------->|<- TPOT x (n-1) ->|

Instants are seconds of ``time.time()`` (one host, or hosts kept in step by NTP); 0.0 means "not reached".
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Instants of one request in seconds since the epoch."""

    arrived: float = 0.0
    routed: float = 0.0
    prefill_started: float = 0.0
    offered: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds."""
        return self.first_token - self.arrived

    def tpot_s(self, num_output: int) -> float:
        """Time per output token after the first, in seconds; 0.0 for an answer of one token."""
        return (self.last_token - self.first_token) / (num_output - 1) if num_output > 1 else 0.0
