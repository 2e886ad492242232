"""A small datastore of a model's tokens, made once for the whole test run: generated questions with their answers."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import islice
from pathlib import Path

from foretoken.data import documents as doc
from foretoken.drafting.datastore.build import build
from foretoken.drafting.datastore.layout import Manifest
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.models.load import load_tokenizer
from foretoken_lab.tasks import arithmetic, forms
from helpers.adapters import shelf

COUNT = 200  # of each task


@cache
def stored(model: str) -> str:
    """The folder of a datastore in a model's tokens."""
    tokenizer = load_tokenizer(model)
    examples = [*islice(arithmetic.examples("train", 1), COUNT), *islice(forms.code_examples("train", 1), COUNT)]
    texts = [doc.exchange(example.prompt, example.response) for example in examples]
    out = Path(tempfile.mkdtemp(dir=shelf())) / "store"
    entries = max(tokenizer.get_vocab().values()) + 1
    manifest = Manifest(entries, vocabulary_fingerprint(tokenizer), model)
    build(tokenizer(texts, add_special_tokens=False)["input_ids"], out, manifest)
    return str(out)
