"""What speculation settings are refused, and how."""

import pytest

from headrace.decode.speculation_config import MAX_DRAFTS, SpeculationConfig
from headrace.model.cache import BACKTRACK_TOKENS, PENDING_ROWS
from headrace.transfer.errors import ConfigError


def test_defaults_speculate_by_confidence() -> None:
    assert SpeculationConfig() == SpeculationConfig(
        proposer="auto", num_drafts=5, schedule="confidence", min_tokens_per_s=None
    )


def test_most_drafts_are_as_many_as_a_slot_can_roll_back() -> None:
    assert MAX_DRAFTS == PENDING_ROWS - 1 < BACKTRACK_TOKENS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_drafts": 0}, "num_drafts = 0 .* from 1 to 6"),
        ({"num_drafts": 7}, "num_drafts = 7 .* from 1 to 6"),
        ({"min_tokens_per_s": 0.0}, "min_tokens_per_s = 0.0"),
        ({"min_tokens_per_s": float("nan")}, "min_tokens_per_s = nan"),
        ({"min_tokens_per_s": float("inf")}, "min_tokens_per_s = inf"),
        ({"min_tokens_per_s": 5.0, "schedule": "fixed"}, "needs schedule = 'confidence'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**settings)  # type: ignore[arg-type]
