"""Fields of a line that say how its prompt is to be treated, not what the answer is."""

import math
from dataclasses import dataclass
from typing import TypeGuard

from ...transfer.request import MAX_PRIORITY, MAX_SALT_CHARACTERS
from .fields import Fields, is_bool, is_int, is_number, is_str


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """See ``transfer.request.Request``."""

    priority: int = 0
    deadline_s: float | None = None
    exact: bool = False
    cache_salt: str = ""


ORDINARY = Handling()


def read_handling(fields: Fields) -> Handling:
    """Raises InvalidRequestError that names a wrong field."""
    limit = MAX_PRIORITY
    priority = fields.take_as("priority", f"an integer from {-limit} to {limit}", _is_priority)
    deadline_s = fields.take_as("deadline_s", "seconds above 0", _is_deadline)
    salt = fields.take_as(
        "cache_salt", f"a string of up to {MAX_SALT_CHARACTERS} characters", _is_salt
    )
    return Handling(
        priority=priority or 0,
        deadline_s=None if deadline_s is None else float(deadline_s),
        exact=bool(fields.take_as("exact", "true or false", is_bool)),
        cache_salt=salt or "",
    )


def _is_priority(value: object) -> TypeGuard[int]:
    return is_int(value) and abs(value) <= MAX_PRIORITY


def _is_deadline(value: object) -> TypeGuard[float]:
    return is_number(value) and 0.0 < value < math.inf


def _is_salt(value: object) -> TypeGuard[str]:
    return is_str(value) and len(value) <= MAX_SALT_CHARACTERS
