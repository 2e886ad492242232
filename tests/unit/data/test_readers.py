"""Files of records and of plain text, compressed or not; every fault is named with its file and line."""

from __future__ import annotations

import gzip
import json
import lzma

import pytest

from foretoken.core.errors import InputError
from foretoken.data import readers
from foretoken.data.readers import is_json_lines, read_paragraphs
from foretoken_lab.records import read_records

RECORDS = [{"id": 1, "text": "Zürich"}, {"id": 2, "text": "東京 🙂"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_records_are_read_through_any_compression(tmp_path, suffix):
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES))
    assert list(read_records(path)) == RECORDS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_plain_text_is_cut_at_the_ends_of_lines(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(readers, "PARAGRAPHS", 20)
    content = "".join(f"line {number} of Zürich\n" for number in range(30)) + "the end"
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](content.encode()))
    pieces = list(read_paragraphs(path))
    assert "".join(pieces) == content
    assert len(pieces) > 5
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_a_text_without_line_ends_is_cut_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PARAGRAPHS", 20)
    (tmp_path / "x.txt").write_text("word " * 100)
    pieces = list(read_paragraphs(tmp_path / "x.txt"))
    assert "".join(pieces) == "word " * 100
    assert max(map(len, pieces)) <= 40


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.jsonl", True), ("a.json.gz", True), ("a.jsonl.xz", True), ("a.txt", False), ("a.gz", False), ("a.md", False)],
)
def test_the_name_says_whether_a_file_holds_records(tmp_path, name, expected):
    assert is_json_lines(tmp_path / name) is expected


def test_empty_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n"))
    assert list(read_records(path)) == RECORDS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"x\.jsonl:3: not valid JSON"),
        (b"[1]", r"x\.jsonl:3: expected a JSON object, found a list"),
        (b'{"id": "\xff"}', r"x\.jsonl:3: not UTF-8 text \(byte 9 of the line\)"),
        (b"[" * 200_000, r"x\.jsonl:3: not valid JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", r"x\.jsonl:3: not valid JSON"),
        (b'{"text": "x"}', r"x\.jsonl:3: needs the field 'id' \(found 'text'\)"),
        (b"{}", r"needs the field 'id' \(found no fields\)"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_the_lines_before_it_are_read(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"id": 1}\n\n' + line + b"\n")
    records = read_records(path, ("id",))
    assert next(records) == {"id": 1}
    with pytest.raises(InputError, match=message):
        next(records)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "checksum", "no archive"])
def test_a_damaged_archive_says_so(tmp_path, suffix, damage):
    whole = bytearray(COMPRESS[suffix](LINES * 50))
    if damage == "cut":
        del whole[len(whole) // 2 :]
    elif damage == "checksum":
        whole[-8:] = bytes(255 - byte for byte in whole[-8:])
    else:
        whole = bytearray(LINES)
    for name, read in (("x.jsonl", read_records), ("x.txt", read_paragraphs)):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(whole)
        with pytest.raises(InputError, match=rf"{path.name}: damaged compressed file"):
            list(read(path))


def test_plain_text_that_is_not_utf_8(tmp_path):
    (tmp_path / "x.txt").write_bytes("Zürich".encode("latin-1"))
    with pytest.raises(InputError, match=r"x\.txt: not UTF-8 text"):
        list(read_paragraphs(tmp_path / "x.txt"))


@pytest.mark.parametrize("read", [read_records, read_paragraphs])
def test_a_file_that_is_none(tmp_path, read):
    with pytest.raises(InputError, match="no such file"):
        list(read(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="this is a folder"):
        list(read(tmp_path))
