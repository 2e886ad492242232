"""What the study of entropy-adaptive decoding counts."""

from __future__ import annotations

from foretoken_lab.suites.entropy_adaptive import Noted


def test_shares_and_switches_are_of_the_noted_writers() -> None:
    noted = Noted({1: [True, True, False, False, True], 2: [False]})
    assert noted.share == 0.5
    assert noted.switches == 1.0  # two, and none
    assert noted.first == 0.5
    assert Noted().switches == 0.0
