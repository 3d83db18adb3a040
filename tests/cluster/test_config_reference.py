"""The configuration reference is what the classes say."""

from headrace.scripts.config_reference import TARGET, render


def test_the_committed_reference_is_up_to_date() -> None:
    written = TARGET.read_text(encoding="utf-8")
    assert written == render(), "run python -m headrace.scripts.config_reference"
