"""Scorers on cases by hand, and answers that they must reject."""

from __future__ import annotations

from fractions import Fraction

import pytest

from foretoken_lab.tasks.answers import final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Tom gets 30 more. 12 + 30 = 42.\n#### 42", 42),
        ("#### 1,250", 1250),
        ("#### $7.50", Fraction(15, 2)),
        ("#### -3", -3),
        ("12 - 5 = 7", 7),
        ("12-5", 5),  # a difference, not a negative number
        ("The answer is 18. Check: 9 + 9.", 18),
        ("so the Answer is: $1,000,000", 1_000_000),
        ("it is 5 or 6", 6),
        ("He pays .5", Fraction(1, 2)),
        ("145.0", 145),
        ("no number", None),
        ("", None),
        ("2 + 2 = 4\n#### four", None),  # nothing else counts after the mark
        ("version v2", None),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == number
