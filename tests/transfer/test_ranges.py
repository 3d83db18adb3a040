import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.transfer.errors import HeadraceError
from headrace.transfer.plan import ARENAS, Copy
from headrace.transfer.ranges import copy_table, descriptors, require_copies_fit, table_fits

THEIRS = {"blocks": 100, "slots": 10, "tails": 20}
OURS = {"blocks": 80, "slots": 12, "tails": 30}

copies = st.builds(
    Copy,
    st.sampled_from(ARENAS),
    st.integers(-2, 103),
    st.integers(-2, 83),
    st.integers(-1, 20),
)


@given(st.lists(copies, min_size=1, max_size=4))
def test_the_table_and_the_rows_agree(copies):
    try:
        require_copies_fit("p", copies, THEIRS, OURS)
        fits = True
    except HeadraceError:
        fits = False
    assert table_fits(copy_table(copies), THEIRS, OURS) is fits


@pytest.mark.parametrize(
    ("copy", "fits"),
    [
        (Copy("blocks", 99, 79, 1), True),
        (Copy("blocks", 100, 0, 1), False),
        (Copy("blocks", 0, 80, 1), False),
        (Copy("slots", 9, 11, 1), True),
        (Copy("slots", 10, 0, 1), False),
        (Copy("slots", 0, 12, 1), False),
        (Copy("slots", 0, 0, 0), False),
        (Copy("tails", 10, 20, 10), True),
        (Copy("tails", 11, 0, 10), False),
        (Copy("blocks", -1, 0, 5), False),
    ],
)
def test_edges(copy, fits):
    assert table_fits(copy_table([copy]), THEIRS, OURS) is fits


def test_descriptors_by_hand():
    table = copy_table([Copy("blocks", 3, 4, 5), Copy("slots", 6, 7, 2)])
    base = 2**63
    target, source = descriptors(
        table, {"blocks": base, "slots": 20, "tails": 30}, {"blocks": 1, "slots": 2, "tails": 3}
    )
    assert target.tolist() == [[5, 5, 0], [9, 2, 0]]
    assert source.tolist() == [[base + 3, 5, 0], [26, 2, 0]]
