"""Messages about unknown names, and exit codes of commands."""

from __future__ import annotations

from foretoken.core.errors import ConfigError, ForetokenError, InputError, ModelError, RequestError, nearest


def test_the_nearest_name_or_all_of_them() -> None:
    known = ["ratio", "block", "match"]
    assert nearest("ration", known) == "did you mean 'ratio'?"
    assert nearest("blocks", known) == "did you mean 'block'?"
    assert nearest("zzzz", known) == "known: block, match, ratio."
    assert nearest("ab", ["abcd", "abxyz12"]) == "did you mean 'abcd'?"
    assert nearest("abcd", ["abxy"]) == "did you mean 'abxy'?"  # half of the letters
    assert nearest("abcdef", ["abc456789"]) == "known: abc456789."


def test_what_a_person_can_change_ends_with_two() -> None:
    assert (ConfigError.exit_code, InputError.exit_code) == (2, 2)
    assert (ForetokenError.exit_code, ModelError.exit_code, RequestError.exit_code) == (1, 1, 1)
