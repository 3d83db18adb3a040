"""The trigger automaton against the plain definition: where a text first appears in the joined bytes."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.decode.grammar_trigger import Trigger

LETTERS = st.text("ab", max_size=4).map(str.encode)


@given(
    text=st.text("ab", min_size=1, max_size=6),
    pieces=st.lists(LETTERS, min_size=1, max_size=12),
    ids=st.data(),
)
def test_it_finds_the_first_place_whatever_the_token_borders(
    text: str, pieces: list[bytes], ids: st.DataObject
) -> None:
    trigger = Trigger(text, pieces, lambda rest: True)
    tokens = ids.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=20))
    state, joined = 0, b""
    for token in tokens:
        joined += pieces[token]
        state, rest = trigger.step(state, token)
        place = joined.find(text.encode())
        assert (rest is None) == (place < 0)
        if rest is not None:
            assert rest == joined[place + len(text) :]
            return
        longest = max(n for n in range(len(text)) if joined.endswith(text.encode()[:n]))
        assert state == longest


@given(
    text=st.text("ab", min_size=1, max_size=5), pieces=st.lists(LETTERS, max_size=12, unique=True)
)
def test_it_refuses_the_tokens_whose_rest_the_language_refuses(
    text: str, pieces: list[bytes]
) -> None:
    def begins_with(rest: bytes) -> bool:
        return rest.startswith(b"a")

    trigger = Trigger(text, pieces, begins_with)
    for state, refused in enumerate(trigger.refused):
        steps = {token: trigger.step(state, token)[1] for token in range(len(pieces))}
        assert set(refused) == {t for t, rest in steps.items() if rest and not begins_with(rest)}


def test_a_trigger_may_lie_inside_characters_of_many_bytes() -> None:
    pieces = [b"\xe2\x82", b"\xac", b"\xacx", b"a"]
    trigger = Trigger("€", pieces, lambda rest: False)
    state, rest = trigger.step(0, 0)
    assert (state, rest) == (2, None)
    assert trigger.step(state, 1)[1] == b""
    assert trigger.step(state, 2)[1] == b"x"
    assert trigger.refused == ((), (), (2,))
