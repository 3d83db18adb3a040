"""The text that must appear before a grammar begins, found in the bytes of tokens whatever their borders.

token bytes   ...  Final an | swer: {" | a": ...
trigger            ~~~~~~~~~~~~~~~
language                            ^ begins here, inside a token: what is left of the token belongs to it
"""

from collections.abc import Callable, Iterator, Sequence


class Trigger:
    """The automaton of one trigger over one vocabulary. Immutable.

    A state is the number of bytes of the trigger that the answer ends with.
    """

    def __init__(
        self, text: str, pieces: Sequence[bytes], begins_with: Callable[[bytes], bool]
    ) -> None:
        """pieces: bytes of every id. begins_with: whether a text of the language can begin with these bytes."""
        self._text = text.encode()
        self._pieces = pieces
        self._borders = _borders(self._text)
        #: For every state the ids that would complete the trigger and go on with what the language refuses.
        self.refused = self._find_refused(begins_with)

    def step(self, state: int, token: int) -> tuple[int, bytes | None]:
        """The state after `token`; once the trigger is complete, also the bytes of the token behind it."""
        piece = self._pieces[token]
        for place, byte in enumerate(piece):
            state = self._next(state, byte)
            if state == len(self._text):
                return state, piece[place + 1 :]
        return state, None

    def _next(self, state: int, byte: int) -> int:
        while state and self._text[state] != byte:
            state = self._borders[state]
        return state + (self._text[state] == byte)

    def _find_refused(self, begins_with: Callable[[bytes], bool]) -> tuple[tuple[int, ...], ...]:
        size = len(self._text)
        # the states that a token which begins with the trigger's last bytes completes
        ending = [list(self._states_ending_with(length)) for length in range(size)]
        refused: list[list[int]] = [[] for _ in range(size)]
        known: dict[bytes, bool] = {}
        for token, piece in enumerate(self._pieces):
            completed: set[int] = set()
            for place in self._ends_in(piece):
                rest = piece[place + 1 :]
                if rest not in known:
                    known[rest] = begins_with(rest)
                for state in ending[max(0, size - place - 1)]:
                    if state not in completed and not known[rest]:
                        refused[state].append(token)
                    completed.add(state)
        return tuple(map(tuple, refused))

    def _states_ending_with(self, length: int) -> Iterator[int]:
        """States whose bytes end with the first `length` bytes of the trigger."""
        for state in range(len(self._text)):
            border = state
            while border > length:
                border = self._borders[border]
            if border == length:
                yield state

    def _ends_in(self, piece: bytes) -> Iterator[int]:
        """Places before a token's last byte where the trigger may end, seen from the token alone."""
        last = self._text[-1:]
        place = piece.find(last, 0, -1)
        while place >= 0:
            head = piece[: place + 1]
            if self._text.endswith(head) or head.endswith(self._text):
                yield place
            place = piece.find(last, place + 1, -1)


def _borders(text: bytes) -> list[int]:
    """For every length: the longest shorter prefix that the prefix of that length ends with."""
    borders = [0, 0]
    for byte in text[1:]:
        border = borders[-1]
        while border and text[border] != byte:
            border = borders[border]
        borders.append(border + (text[border] == byte))
    return borders
