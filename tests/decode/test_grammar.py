"""GrammarState: masks with drafts, EOS, triggers, replay, budgets."""

import json
import random

import numpy as np
import pytest

from headrace.decode.grammar import GrammarState
from headrace.transfer.errors import GrammarError

from .grammar_support import accepts, allowed, language, text_of, tokenizer, write

EOS = tokenizer().eos_token_id
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["x", "name"],
}


def encode(text: str) -> list[int]:
    return tokenizer().encode(text)


def test_rows_of_drafts_equal_the_rows_step_by_step() -> None:
    of = language("json_schema", POINT)
    ids = write(GrammarState(of), seed=3)
    assert ids is not None
    state, chance = GrammarState(of), random.Random(1)
    done = 0
    while done < len(ids):
        drafts = ids[done : done + chance.randint(0, 5)]
        rows = state.masks(drafts)
        walk = [state.mask(), *(state.extend(token) for token in drafts)]
        assert np.array_equal(rows, np.stack(walk))
        stepwise = GrammarState.replay(of, ids[:done])
        for row, token in zip(rows, [*drafts, None], strict=True):
            assert np.array_equal(row, stepwise.masks()[0])
            stepwise.advance([] if token is None else [token])
        taken = chance.randint(0, len(drafts)) or 1
        state.advance(ids[done : done + taken])
        done += taken


def test_rows_behind_a_refused_draft_are_all_ones_and_nothing_moves() -> None:
    state = GrammarState(language("json_schema", POINT))
    before = state.masks()
    good, bad = encode("{")[0], encode("}")[0]
    rows = state.masks([good, bad, good])
    assert bad not in allowed(rows[1])
    assert (rows[2:] == 0xFFFFFFFF).all()
    assert np.array_equal(state.masks(), before)
    assert (state.extend(bad) == 0xFFFFFFFF).all()
    assert (state.extend(good) == 0xFFFFFFFF).all()
    state.reset()
    assert np.array_equal(state.masks(), before)


def test_eos_only_where_the_language_may_end() -> None:
    state = GrammarState(language("regex", "ab?"))
    assert EOS not in allowed(state.mask())
    assert not state.finished
    state.advance(encode("a"))
    assert EOS in allowed(state.mask())
    assert not state.finished
    state.advance(encode("b"))
    assert allowed(state.mask()) == {EOS}
    assert state.finished
    rows = state.masks([EOS, 5])
    assert (rows[1:] == 0xFFFFFFFF).all()
    state.advance([EOS])
    assert state.finished
    assert (state.masks([7, 8]) == 0xFFFFFFFF).all()


def test_special_tokens_are_part_of_no_language() -> None:
    row = GrammarState(language("regex", "(.|\n)*")).mask()
    assert not allowed(row) & (tokenizer().special_ids - {EOS})
    assert len(allowed(row)) > 3000


def test_a_token_that_is_refused_cannot_be_added() -> None:
    state = GrammarState(language("regex", "ab"))
    with pytest.raises(GrammarError, match=r"number 1 of 2 .* not allowed"):
        state.advance([*encode("a"), EOS])


def test_a_dead_end_is_an_error_not_a_row_of_nothing() -> None:
    state = GrammarState(language("ebnf", 'root ::= "a" b\nb ::= "b" b'))
    state.advance(encode("a"))
    state.masks()
    dead = GrammarState(language("regex", "a[^\\s\\S]"))
    dead.advance(encode("a"))
    with pytest.raises(GrammarError, match="no token can follow"):
        dead.masks()
    with pytest.raises(GrammarError, match="no token can follow"):
        dead.mask()


def test_replay_stands_where_the_original_does() -> None:
    of = language("json_schema", POINT)
    ids = write(GrammarState(of), seed=11)
    assert ids is not None
    state = GrammarState(of)
    for count, token in enumerate(ids[:-1], start=1):
        state.advance([token])
        assert np.array_equal(GrammarState.replay(of, ids[:count]).masks(), state.masks())
    with pytest.raises(GrammarError, match="replayed"):
        GrammarState.replay(language("regex", "z+"), ids)


def test_free_text_until_the_trigger_then_the_language() -> None:
    of = language("json_schema", POINT, trigger="</think>")
    state = GrammarState(of)
    thinking = encode("Let us see: }{ ")
    rows = state.masks(thinking)
    assert all(len(allowed(row)) > 4000 and EOS not in allowed(row) for row in rows)
    state.advance(thinking)
    assert allowed(state.masks(encode("</think>"))[1]) == allowed(
        GrammarState(language("json_schema", POINT)).mask()
    )
    state.advance([*encode("</think>"), *encode('{"x":1,"name":"a"}')])
    assert state.finished


def test_the_rest_of_the_token_that_completes_a_trigger_belongs_to_the_language() -> None:
    pieces = tokenizer().token_bytes
    brace, word = pieces.index(b" {"), pieces.index(b" the")
    of = language("json_schema", POINT, trigger="answer: ")
    state = GrammarState(of)
    state.advance(encode("answer:"))
    row = allowed(state.mask())
    assert brace in row
    assert word not in row
    state.advance([brace])
    assert allowed(state.mask()) == allowed(GrammarState.replay(of, encode("answer: {")).mask())
    with pytest.raises(GrammarError):
        GrammarState.replay(of, [*encode("answer:"), word])


def test_a_walk_over_the_trigger_comes_back() -> None:
    state = GrammarState(language("regex", "[0-9]{3}", trigger="N="))
    before = state.masks()
    walk = encode("xN=123")
    rows = state.masks([*walk, EOS])
    assert allowed(rows[-2]) == {EOS}
    for token in walk:
        state.extend(token)
    assert allowed(state.mask()) == {EOS}
    state.reset()
    assert np.array_equal(state.masks(), before)
    state.advance(walk)
    assert state.finished


def test_an_ambiguous_grammar_fails_alone_when_its_masks_become_slow() -> None:
    state = GrammarState(
        language("ebnf", 'root ::= x x x x x x\nx ::= x x x | x x | "a" | "aa" | ""')
    )
    a = encode("a")
    with pytest.raises(GrammarError, match=r"(a mask|a token) takes longer than .* ms"):
        for _ in range(2000):
            state.masks(a)
            state.advance(a)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": None,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
            "strict": True,
        },
    }
]
CALL = (
    '<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def test_tool_calls_in_the_format_of_the_model() -> None:
    about = {"tools": TOOLS}
    free, required = language("tool_call", about), language("tool_call_required", about)
    opened = f"\n\n<｜DSML｜ calls>\n{CALL}"
    assert accepts(required, CALL)
    assert not accepts(required, opened)
    assert not accepts(required, "no call")
    call = CALL.removesuffix("</｜DSML｜ calls>")
    assert accepts(required, call + CALL)
    single = language("tool_call_required", about | {"parallel_tool_calls": False})
    assert accepts(single, CALL)
    assert not accepts(single, call + CALL)
    assert accepts(free, "no call")
    assert accepts(free, f"I will ask.{opened}")
    for wrong in (
        CALL.replace('"weather"', '"wether"'),
        CALL.replace(">3<", ">three<"),
        CALL.replace('"city"', '"town"'),
    ):
        assert not accepts(required, wrong)
        assert not accepts(free, f"I will ask.\n\n<｜DSML｜ calls>\n{wrong}")


def test_white_space_between_the_signs_of_json_is_bounded() -> None:
    of = language("json_schema", POINT)
    for count, is_fine in ((20, True), (21, False)):
        assert accepts(of, f'{{{" " * count}"x":1,"name":"{" " * 30}"}}') == is_fine


def test_json_object_is_an_object() -> None:
    of = language("json_object", "")
    assert accepts(of, '{"a": [1, {"b": null}]}')
    assert not accepts(of, "[1]")
    ids = write(GrammarState(of), seed=5)
    assert ids is not None
    assert isinstance(json.loads(text_of(ids)), dict)
