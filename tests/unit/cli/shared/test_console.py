"""Progress without a terminal: a line now and then, and none where it is soon done."""

from __future__ import annotations

from foretoken.cli.shared import console


def test_a_line_now_and_then(monkeypatch, capsys):
    clock = iter([0.0, 10.0, 31.0, 31.0, 40.0, 62.0, 62.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress_bar("1 of 2: ", 1234) as advance:
        advance("none")
        advance("suffix")
        advance()
        advance("ngram")
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("1 of 2: suffix: 2 of 1,234, about 318 min left")
    assert second.startswith("1 of 2: ngram: 4 of 1,234, about 318 min left")


def test_short_work_prints_no_progress(capsys):
    with console.progress_bar("prompts", 2) as advance:
        advance()
        advance()
    assert capsys.readouterr() == ("", "")
