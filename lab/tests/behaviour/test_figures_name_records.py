"""Every figure that a page quotes is in a record that the section links, and every record that is quoted is sound.

README, the pages of docs/ and the method cards: a section with a measured figure links a record that has the
number; or a comment gives the reason why there is none, which readers do not see::

    <!-- not measured: follows from the number of bits -->

Pages of results hold a table of their records, made by scripts/records.py, with the faults of each.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


records, tables = script("records"), script("tables")
RECORDS = [path for path in sorted(records.RESULTS.glob("*.json*")) if path.name != "prompts.jsonl"]  # input, no record
SOUND = [path for path in RECORDS if not records.faults(path)]

NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"(?:x\b|times\b|%|per cent|tokens/s|tokens (?:a|per) (?:step|second)|points\b|nats\b"
    r"|ms\b|µs\b|(?:milli|micro)?seconds\b|MB\b|GB\b)"
)
FIGURE = re.compile(rf"(?<![\w.])({NUMBER}(?:(?:–| to |, | and |-| or ){NUMBER})*) ?\**{UNIT}")
CELL = re.compile(r"\**[−+-]?(\d[\d,]*\.\d+)\**(?: ?(?:%|x|nats))?(?: \(.*\))?")
NOT_MEASURED = re.compile(r"<!-- not measured: .+? -->", flags=re.DOTALL)


def by_hand(text: str) -> str:
    """A page without code blocks and without tables that are made."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return records.ORIGINS.sub("", records.MEASURED.sub("", tables.PLACE.sub("", text)))


def sections(text: str) -> list[str]:
    return re.split(r"^(?=#{1,4} )", by_hand(text), flags=re.MULTILINE)


def figures(section: str) -> list[str]:
    """The measured figures of a section as they are written, numbers alone."""
    words = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|95 %\s+interval", "`", section, flags=re.DOTALL)
    found = [number for figure in FIGURE.finditer(words) for number in re.findall(NUMBER, figure[1])]
    rows = [line.strip().strip("|").split("|") for line in words.splitlines() if line.startswith("|")]
    found += [match[1] for row in rows for cell in row if (match := CELL.fullmatch(cell.strip()))]
    return list(dict.fromkeys(found))


def numbers(value: Any) -> Iterator[float]:
    """Every number in a record."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def is_in(figure: str, found: list[float]) -> bool:
    """Whether a number of a record rounds to a figure, as it is, per cent or in thousandths."""
    places = len(figure.partition(".")[2])
    text = figure.replace(",", "")
    return any(f"{abs(scale * number):.{places}f}" == text for number in found for scale in (1, 100, 1000))


def mistakes(page: Path, text: str) -> list[str]:
    """The faults of the figures of a page."""
    found = []
    for section in sections(text):
        quoted = figures(section)
        if not quoted or NOT_MEASURED.search(section):
            continue
        heading = section.splitlines()[0]
        linked = records.linked(page, section)
        if not linked:
            found.append(f"{heading}: {quoted} without a record")
            continue
        found += [f"{heading}: {each.name} is withdrawn" for each in linked if records.faults(each)]
        known = [number for each in linked for part in records.parts(each) for number in numbers(part)]
        found += [f"{heading}: {each} is not in the record" for each in quoted if not is_in(each, known)]
    return found


@pytest.mark.parametrize("page", records.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_figure_of_a_page_is_in_a_sound_record(page):
    assert mistakes(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [*records.PAGES, *records.OF_RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_a_page_are_those_of_its_records(page):
    text = page.read_text(encoding="utf-8")
    assert text == records.rewritten(page, text), "run make fix"


@pytest.mark.parametrize("page", records.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_that_are_made_come_from_sound_records(page):
    for place in records.MEASURED.finditer(page.read_text(encoding="utf-8")):
        assert records.faults(records.record_of(place[2])) == []


@pytest.mark.parametrize("page", records.OF_RESULTS, ids=lambda page: page.stem)
def test_a_page_of_results_has_the_table_of_its_records(page):
    assert len(records.ORIGINS.findall(page.read_text(encoding="utf-8"))) == 1


def test_every_record_has_a_page():
    linked = {each for page in records.OF_RESULTS for each in records.linked(page, page.read_text(encoding="utf-8"))}
    assert [each.name for each in RECORDS if each not in linked] == []


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def history() -> None:
    try:
        shallow = git("rev-parse", "--is-shallow-repository")
    except OSError:
        pytest.skip("git is not installed")
    if shallow.returncode:
        pytest.skip("this is no clone, so it has no history")
    if shallow.stdout.strip() == "true":
        pytest.skip("this is a shallow clone: the commits of records are not in it")


@pytest.mark.parametrize("record", SOUND, ids=lambda record: record.name)
@pytest.mark.usefixtures("history")
def test_the_commit_of_a_sound_record_is_in_the_history(record):
    for part in records.parts(record):
        for origin in records.origins(part):
            found = git("merge-base", "--is-ancestor", origin["commit"], "HEAD")
            assert found.returncode == 0, f"{origin['commit']} is not in the history: {found.stderr}"


COMMIT = "042a08a893dc4475c4457b71c2f6295a0e9a16fc"


def record(folder: Path, **changes: Any) -> Path:
    today = {name: check for name, check in records.weights_of_today().items() if name.startswith(("base/", "draft/"))}
    origin = {"commit": COMMIT, "command": "foretoken bench --model zoo:base", "cpu": "AMD EPYC", "models": today}
    path = folder / "record.json"
    path.write_text(json.dumps({"provenance": {**origin, **changes}, "speedup": 1.2147}), encoding="utf-8")
    return path


def test_a_record_with_an_origin_is_sound(tmp_path):
    assert records.faults(record(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"commit": None}, "it names no commit"),
        ({"commit": f"{COMMIT}-dirty"}, "the code was not committed"),
        ({"command": "foretoken bench --model zoo:moved"}, "`moved` is no longer bundled"),
        ({"models": {"base/model": "0"}}, "it measured a former `base`"),
        ({"models": {}}, "it measured a former `base`"),
    ],
)
def test_a_record_without_an_origin_or_with_other_weights_is_not_sound(tmp_path, changes, fault):
    assert records.faults(record(tmp_path, **changes)) == [fault]


def test_a_head_counts_where_its_method_is_named(tmp_path):
    weights = {**records.weights_of_today(), "base/eagle/model": "0"}
    assert records.faults(record(tmp_path, models=weights)) == []
    assert records.faults(record(tmp_path, models=weights, methods="eagle")) == ["it measured a former `base/eagle`"]


def test_a_record_without_checksums_or_provenance_is_not_sound(tmp_path):
    path = record(tmp_path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    del whole["provenance"]["models"]
    path.write_text(json.dumps(whole), encoding="utf-8")
    assert records.faults(path) == ["it names no models"]
    path.write_text("{}", encoding="utf-8")
    assert records.faults(path) == ["it has no provenance"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("It is 2.95x as fast, 1,946 tokens/s.", ["2.95", "1,946"]),
        ("0.94 to 1.05 times; 3.65 and 3.68 tokens a step; 17 % of them", ["0.94", "1.05", "3.65", "3.68", "17"]),
        ("| `eagle` | **3.98** | 0.31 nats | +0.6 % | 4 |", ["0.31", "0.6", "3.98"]),
        ("`--limit 40 %`, [2.0x](a.md), 16 M parameters, section 4.1, arXiv:2503.01840", ["2.0"]),
        ("```\n5.0x\n```\nnone", []),
    ],
)
def test_figures_are_found(words, expected):
    assert figures(by_hand(words)) == expected


def test_a_figure_needs_a_sound_record_that_has_it(tmp_path):
    record(tmp_path)
    page = tmp_path / "page.md"
    link = "[record](record.json)"
    assert mistakes(page, "# A\n\n1.21 times") == ["# A: ['1.21'] without a record"]
    assert mistakes(page, f"# A\n\n1.21 times {link}\n") == []
    assert mistakes(page, f"# A\n\n1.22 times {link}\n") == ["# A: 1.22 is not in the record"]
    assert mistakes(page, f"{link}\n\n# A\n\n1.21 times") == ["# A: ['1.21'] without a record"]
    assert mistakes(page, "# A\n\n<!-- not measured: an example -->\n1.21 times") == []
    record(tmp_path, commit=None)
    assert mistakes(page, f"# A\n\n1.21 times {link}\n") == ["# A: record.json is withdrawn"]
