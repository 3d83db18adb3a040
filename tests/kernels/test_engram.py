"""Engram kernels against their twins."""

import torch

from headrace.kernels import engram
from headrace.kernels.reference import engram as twin
from headrace.kernels.reference.quant import quantize_fp8_rows


def test_hash_ngrams_and_table_rows_are_the_same_to_the_bit(seeded: torch.Generator) -> None:
    grams = torch.randint(0, 3000, (25, 4), generator=seeded)
    multipliers = torch.randint(1, 2**40, (4,), generator=seeded) * 2 + 1
    primes = torch.tensor([2003, 2011, 2017, 2027, 2029, 2039])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.cumsum(0)[:-1]))
    rows = engram.hash_ngrams(grams, multipliers, primes, offsets)
    assert torch.equal(rows, twin.hash_ngrams(grams, multipliers, primes, offsets))
    values, scales = quantize_fp8_rows(torch.randn(int(primes.sum()), 32, generator=seeded))
    values = values.view(torch.uint8)
    read = engram.read_rows(values, scales, rows)
    assert torch.equal(read, twin.read_rows(values, scales, rows))


def test_write(seeded: torch.Generator) -> None:
    streams, projected = (
        torch.randn(13, 4, 64, generator=seeded),
        torch.randn(13, 320, generator=seeded),
    )
    query, key = torch.rand(4, 64, generator=seeded), torch.rand(4, 64, generator=seeded)
    writable = torch.rand(13, generator=seeded) < 0.7
    ours = engram.write(streams, projected, query, key, writable, 1e-20)
    theirs = twin.write(streams, projected, query, key, writable, 1e-20)
    # A dot product of 64 around zero: the root of its error, 64 * 2^-24, is what the gate may show.
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=2e-3)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-2)
    assert torch.equal(ours[0][~writable], streams[~writable])
