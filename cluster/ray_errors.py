"""The one place where Ray's exceptions become ours."""

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from ..transfer.errors import DeadlineError, HeadraceError, RankError


def translate(error: BaseException, who: str) -> HeadraceError:
    """``error`` as one of ours, its message beginning with ``who``; the type of ours is kept."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, HeadraceError):
        text = str(cause)
        return type(cause)(text if text.startswith(who) else f"{who}: {text}")
    if isinstance(cause, ActorDiedError | ActorUnavailableError | RayActorError):
        return RankError(f"{who}: its process is gone: {_first_lines(str(cause))}")
    if isinstance(cause, RuntimeEnvSetupError):
        return RankError(f"{who}: its environment could not be made: {_first_lines(str(cause))}")
    if isinstance(cause, GetTimeoutError | TimeoutError):
        return DeadlineError(f"{who}: no answer in time")
    return RankError(f"{who}: {type(cause).__name__}: {_first_lines(str(cause))}")


def _first_lines(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())[:600]
