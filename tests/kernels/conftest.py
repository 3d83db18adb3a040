"""A test's numbers are random, but always the same: the seed is a hash of the test's id."""

import hashlib

import pytest
import torch


@pytest.fixture
def seeded(request: pytest.FixtureRequest) -> torch.Generator:
    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
