"""What a mistake on the command line must look like."""

from __future__ import annotations

from typing import Any


def assert_one_line(capsys: Any, message: str, progress: str | None = None) -> None:
    """One line that names the mistake, perhaps one with a remedy; nothing on the standard output, no traceback.

    Args:
        progress: how lines of progress before it begin, if there may be some.
    """
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    # the first three on a busy machine
    expected = ("loading ", "checking ", "packing ", *([progress] if progress else []))
    lines = [line for line in err.rstrip().splitlines() if not line.startswith(expected)]
    assert lines[0].startswith("error: ")
    assert len(lines) <= 2
