"""The draw against its twin, on rows that are cut everywhere, tied, masked, huge and broken."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.kernels import sample as kernel
from headrace.kernels.reference import sample as twin
from headrace.kernels.reference.sample import Choices


def choices(vocabulary: int, num_rows: list[int], **params: list[float]) -> Choices:
    """Requests of ``num_rows`` rows; params that are not given are neutral."""
    count = len(num_rows)

    def column(name: str, neutral: float, dtype: type) -> npt.NDArray[np.generic]:
        return np.array(params.get(name, [neutral] * count), dtype)

    return Choices(
        num_rows=np.array(num_rows, np.int64),
        temperature=column("temperature", 1.0, np.float64),  # pyright: ignore[reportArgumentType]
        top_p=column("top_p", 1.0, np.float64),  # pyright: ignore[reportArgumentType]
        min_p=column("min_p", 0.0, np.float64),  # pyright: ignore[reportArgumentType]
        top_k=column("top_k", vocabulary, np.int64),  # pyright: ignore[reportArgumentType]
        seed=column("seed", 7, np.uint64),  # pyright: ignore[reportArgumentType]
        position=column("position", 100, np.int64),  # pyright: ignore[reportArgumentType]
        replaced_at=np.full(count, -1, np.int64),
        replaced=torch.empty(0, vocabulary),
        mask_at=np.full(count, -1, np.int64),
        masks=np.empty((0, -(-vocabulary // 32)), np.uint32),
    )


@pytest.mark.parametrize("vocabulary", [1, 5, 31, 32, 700])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0, 1e4])
def test_rows_equal_the_twins(vocabulary: int, spread: float, seeded: torch.Generator) -> None:
    rng = np.random.default_rng(int(torch.randint(2**31, (1,), generator=seeded)))
    num_rows = [1 + r % 3 for r in range(40)]
    logits = torch.randn(sum(num_rows), vocabulary, generator=seeded) * spread
    logits[::2] = logits[::2].round()  # many ties
    wanted = choices(
        vocabulary,
        num_rows,
        temperature=list(rng.choice([0.0, 1e-5, 0.3, 1.0, 2.0, 100.0], 40)),
        top_p=list(rng.choice([1e-9, 0.3, 0.9, 0.999999, 1.0], 40)),
        min_p=list(rng.choice([0.0, 1e-3, 0.2, 1.0], 40)),
        top_k=list(rng.choice([1, 2, 50, vocabulary], 40)),
        seed=list(rng.integers(0, 2**63 - 1, 40)),
        position=list(rng.integers(0, 10**6, 40)),
    )
    wanted = replace(
        wanted,
        replaced=torch.randn(9, vocabulary, generator=seeded),
        replaced_at=np.where(np.arange(40) % 11 == 3, 2 * (np.arange(40) // 11), -1),
        masks=rng.integers(0, 2**32, (12, -(-vocabulary // 32)), np.uint32),
        mask_at=np.where(np.arange(40) % 13 == 4, 3 * (np.arange(40) // 13), -1),
    )
    ours, theirs = kernel.draw(logits, wanted), twin.draw(logits, wanted)
    assert ours.tolist() == theirs.tolist()
    assert ours.max() < vocabulary


def test_a_large_vocabulary_equals_the_twins(seeded: torch.Generator) -> None:
    logits = torch.randn(6, 20_000, generator=seeded) * 3
    wanted = choices(20_000, [6], top_p=[0.95])
    assert kernel.draw(logits, wanted).tolist() == twin.draw(logits, wanted).tolist()


def test_broken_rows_give_no_token_and_leave_the_others_alone() -> None:
    rows = torch.zeros(9, 40)
    rows[1, 3] = float("nan")
    rows[2, 39] = -float("nan")
    rows[3, 0] = float("inf")
    rows[4] = -float("inf")
    rows[5, :39] = -float("inf")
    rows[6, 5] = 3e38
    rows[6, 6] = -3e38
    rows[7] = torch.tensor([-0.0, 0.0] * 20)
    for temperature in (0.0, 1.0):
        wanted = choices(40, [9], temperature=[temperature], top_p=[0.9])
        ids = kernel.draw(rows, wanted).tolist()
        assert ids == twin.draw(rows, wanted).tolist()
        assert [i for i, token in enumerate(ids) if token < 0] == [1, 2, 3, 4]
        assert ids[5:7] == [39, 5]
    assert kernel.draw(rows[7:], choices(40, [2], temperature=[0.0])).tolist() == [0, 0]


def test_a_mask_without_a_bit_gives_no_token() -> None:
    wanted = replace(
        choices(40, [2]), mask_at=np.zeros(1, np.int64), masks=np.array([[0, 0], [4, 0]], np.uint32)
    )
    assert kernel.draw(torch.randn(2, 40), wanted).tolist() == [-1, 2]


def test_no_rows() -> None:
    assert kernel.draw(torch.zeros(0, 8), choices(8, [])).tolist() == []


def test_masses_are_exponentials() -> None:
    below = -torch.rand(2000).mul(30).numpy()
    below[:3] = (0.0, -27.7, -np.inf)
    for temperature in (0.5, 1.0, 7.0):
        found = twin.masses(below, temperature) * 2.0**-40
        exact = np.exp(below.astype(np.float64) / temperature)
        # the product with 1/t is rounded, then multiplied by up to 30; a unit is 2^-40
        np.testing.assert_allclose(found, exact, rtol=60 * 2.0**-24 + 4e-7, atol=2.0**-39)


def test_the_stream_is_pinned() -> None:
    # The stream is part of the product: a change here changes every seeded answer.
    assert twin.stream_key(7, 3) == 16292704262132694875
    assert twin.exponentials(twin.stream_key(0, 0), 2).tolist() == pytest.approx(
        [1.0568423843135826, 1.2080213537251958], rel=1e-14
    )
