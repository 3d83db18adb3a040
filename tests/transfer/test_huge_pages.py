import torch

from headrace.transfer.huge_pages import use_huge_pages


def test_the_bytes_stay_what_they_were():
    arena = torch.arange(9 << 20, dtype=torch.int64).to(torch.uint8)
    before = arena.clone()
    use_huge_pages(arena)
    assert torch.equal(arena, before)


def test_small_tensors_are_left_alone():
    assert use_huge_pages(torch.zeros(4096, dtype=torch.uint8)) is False
    assert use_huge_pages(torch.zeros(0, dtype=torch.uint8)) is False
