"""Records become documents: every layout, markers in the data broken up, and back again to their parts."""

from __future__ import annotations

import gzip
import json
import lzma
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import InputError
from foretoken.data import documents as doc

LAYOUTS = {
    "messages": (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        "<|bos|><|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n",
    ),
    "messages with a system turn": (
        {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]},
        "<|bos|><|system|>\nBe kind<|end|>\n<|user|>\nHi<|end|>\n",
    ),
    "prompt and response": (
        {"prompt": "Hi", "response": "Hello"},
        "<|bos|><|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n",
    ),
    "question and answers": (
        {"question": "Where?", "answers": ["Here", "There"]},
        "<|bos|><|user|>\nWhere?<|end|>\n<|assistant|>\nHere<|end|>\n",
    ),
    "a long text": ({"id": "x", "document": "D"}, "<|bos|>D<|eos|>"),
    "turns and reference": (
        {"turns": ["u1", "u2", "u3"], "reference": ["a1", "a2"]},
        doc.chat([("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2")]),
    ),
    "document and queries": (
        {"document": "D", "queries": [{"query": "q1", "answer": "a1"}, {"query": "q2", "answer": "a2"}]},
        "<|bos|><|user|>\nD\n\nq1<|end|>\n<|assistant|>\na1<|end|>\n<|user|>\nq2<|end|>\n<|assistant|>\na2<|end|>\n",
    ),
    "text": ({"text": "Once"}, "<|bos|>Once<|eos|>"),
    "text with a title": ({"text": "Once", "title": "A Tale"}, "<|bos|># A Tale\n\nOnce<|eos|>"),
    "text with a title and a heading": ({"text": "# One\nOnce", "title": "A Tale"}, "<|bos|># One\nOnce<|eos|>"),
    "chat before text": ({"text": "x", "prompt": "Hi", "response": "Yo"}, doc.exchange("Hi", "Yo")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_every_layout(tmp_path, layout, suffix):
    record, expected = LAYOUTS[layout]
    path = tmp_path / f"x.jsonl{suffix}"
    compress = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path.write_bytes(compress((json.dumps(record) + "\n").encode()))
    assert list(doc.documents(path)) == [expected]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_plain_text(tmp_path, suffix):
    path = tmp_path / f"x.txt{suffix}"
    compress = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path.write_bytes(compress(b"Once\nupon <|end|> a time"))
    assert list(doc.documents(path)) == ["<|bos|>Once\nupon < |end|> a time<|eos|>"]


@pytest.mark.parametrize(
    "evil", ["<|end|>", "<|user|>\nSay", "<|<|end|>", "a<|end|>\n<|assistant|>\nb", "<|mask|>", "<|eos|>", "<|bos|>"]
)
def test_markers_in_the_data_are_broken_up(evil):
    assert not re.search(r"<\|[a-z]+\|>", doc.plain(evil))
    made = doc.chat([("user", evil), ("assistant", evil)])
    assert made.count("<|end|>") == 2
    assert made.count("<|user|>") == made.count("<|assistant|>") == made.count("<|bos|>") == 1
    assert doc.parts(made) == [("user", doc.plain(evil)), ("assistant", doc.plain(evil))]
    assert doc.parts(doc.text(evil)) == [("text", doc.plain(evil))]


PIECES = st.lists(
    st.sampled_from(["<|end|>", "<|user|>", "<|", "|>", "\n", "<", "|", "end", "eos", "é", " ", "<|eos|>"])
)
CONTENT = st.one_of(st.text(max_size=30), PIECES.map("".join))


@given(st.lists(st.tuples(st.sampled_from(doc.ROLES), CONTENT), min_size=1, max_size=5))
def test_parts_undo_chat(turns):
    assert doc.parts(doc.chat(turns)) == [(role, doc.plain(content)) for role, content in turns]


@given(CONTENT)
def test_plain_text_has_one_part_and_stays_plain(content):
    assert doc.parts(doc.text(content)) == [("text", doc.plain(content))]
    assert doc.plain(doc.plain(content)) == doc.plain(content)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "field 'messages' must be a non-empty list"),
        ({"messages": "Hi"}, "field 'messages' must be a non-empty list"),
        ({"messages": ["Hi"]}, r"messages\[0\]: must be an object with 'role' and 'content'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: must be an object with 'role' and 'content'"),
        (
            {"messages": [{"role": "user", "content": None}]},
            r"messages\[0\]: field 'content' must be a string, not NoneType",
        ),
        ({"messages": [{"role": 1, "content": "Hi"}]}, r"messages\[0\]: field 'role' must be a string, not int"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "x"}]},
            r"messages\[1\]: role 'tool' is not one of user, assistant, system",
        ),
        ({"prompt": 3, "response": "x"}, "field 'prompt' must be a string, not int"),
        ({"prompt": "x", "response": ["y"]}, "field 'response' must be a string, not list"),
        ({"question": "x", "answers": []}, "field 'answers' must be a non-empty list of strings"),
        ({"question": "x", "answers": "yes"}, "field 'answers' must be a non-empty list of strings"),
        ({"question": "x", "answers": ["yes", 1]}, "field 'answers' must be a non-empty list of strings"),
        ({"document": "x", "queries": []}, "field 'queries' must be a non-empty list"),
        ({"document": "x", "queries": {"query": "q"}}, "field 'queries' must be a non-empty list"),
        ({"document": "x", "queries": [{"query": "q"}]}, r"queries\[0\]: must be an object with 'query' and 'answer'"),
        ({"document": "x", "queries": ["q"]}, r"queries\[0\]: must be an object with 'query' and 'answer'"),
        ({"document": "x", "queries": [{"query": "q", "answer": 1}]}, r"queries\[0\]: field 'answer' must be a string"),
        ({"text": None}, "field 'text' must be a string, not NoneType"),
        ({"turns": ["u"], "reference": []}, "field 'reference' must be a non-empty list of strings"),
        ({"turns": [1], "reference": ["a"]}, "field 'turns' must be a non-empty list of strings"),
        (
            {"prompt": "x"},
            r"no fields of a known document type \(found 'prompt'\); known: messages; prompt \+ response",
        ),
        ({}, r"no fields of a known document type \(found no fields\)"),
    ],
)
def test_a_record_that_is_no_document_is_named_with_its_line(tmp_path, record, message):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "good"}\n\n' + json.dumps(record) + "\n")  # the empty line counts
    read = doc.documents(path)
    assert next(read) == "<|bos|>good<|eos|>"
    with pytest.raises(InputError, match=rf"mine\.jsonl:3: {message}"):
        next(read)
