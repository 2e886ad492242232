"""A small datastore of a model's tokens, made once for the whole test run: 400 questions with their answers."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from foretoken.data import documents as doc
from foretoken.drafting.datastore.build import build
from foretoken.drafting.datastore.layout import Manifest
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.models.load import load_tokenizer
from foretoken_lab.records import read_records
from helpers.adapters import shelf

ANSWERS = Path(__file__).with_name("stored_answers.jsonl.xz")  # of tasks that the lab generates


@cache
def stored(model: str) -> str:
    """The folder of a datastore in a model's tokens."""
    tokenizer = load_tokenizer(model)
    texts = [doc.exchange(each["prompt"], each["response"]) for each in read_records(ANSWERS, ("prompt", "response"))]
    out = Path(tempfile.mkdtemp(dir=shelf())) / "store"
    entries = max(tokenizer.get_vocab().values()) + 1
    manifest = Manifest(entries, vocabulary_fingerprint(tokenizer), model)
    build(tokenizer(texts, add_special_tokens=False)["input_ids"], out, manifest)
    return str(out)
