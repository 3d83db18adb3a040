"""What a deployment says about grammars."""

from dataclasses import dataclass

from ..transfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """How much compiling grammars may cost; a grammar beyond it fails its own request only. Raises ConfigError."""

    compile_timeout_s: float = 10.0
    """How long one grammar may compile."""
    queue_timeout_s: float = 60.0
    """How long it may wait before that."""
    memory_mib: int = 512
    """Memory of one compile, in MiB."""
    cache_mib: int = 256
    """Compiled grammars that are kept, in MiB; the longest unused one goes first."""
    workers: int = 2
    """Grammars compiled at a time."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"grammar.{name} = {value} is not allowed: a number above 0")
