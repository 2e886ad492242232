"""The public corpora that the bundled models are trained on and judged by: one explicit table.

A corpus is a set of files under one data folder (``foretoken.data.folder``). What a licence does not let into weights
that are given away says so here, and a test holds every recipe of a bundled model to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import ConfigError, InputError, nearest


@dataclass(frozen=True, slots=True)
class Corpus:
    """One corpus.

    Attributes:
        files: patterns relative to the data folder.
        licence: as its publisher states it.
        origin: where it was published.
        bundled: whether weights trained on it may be given away.
    """

    files: tuple[str, ...]
    licence: str
    origin: str
    bundled: bool = True


CORPORA = {
    "books": Corpus(("books/part*.jsonl.xz",), "public domain", "mlschmitt/classic-books-markdown"),
    "sgd_dialogues": Corpus(("sgd_dialogues/train.jsonl.xz",), "CC BY-SA 4.0", "Schema-Guided Dialogue, Google"),
    "topical_chat": Corpus(("topical_chat/train.jsonl.xz",), "CDLA-Sharing-1.0", "Topical-Chat, Amazon Alexa"),
    "taskmaster4": Corpus(("taskmaster4/train.jsonl.xz",), "CC BY 4.0", "Taskmaster TM-4, Google"),
    "gsm8k": Corpus(("gsm8k_train/train.jsonl.gz",), "MIT", "openai/grade-school-math"),
    "math": Corpus(("math_train/train.jsonl.gz",), "MIT", "hendrycks MATH"),
    "mbpp": Corpus(("mbpp_train/train.jsonl.gz",), "CC BY 4.0", "MBPP, Google Research"),
    "stdlib": Corpus(("python_stdlib/lib.jsonl.xz",), "PSF-2.0", "CPython 3.11.7"),
    "stdlib_tests": Corpus(("python_stdlib/tests.jsonl.xz",), "PSF-2.0", "CPython 3.11.7"),
    "stdlib_functions": Corpus(("python_stdlib/functions.jsonl.gz",), "PSF-2.0", "CPython 3.11.7"),
    "openstax": Corpus(("openstax_textbooks/train.jsonl.xz",), "CC BY 4.0", "OpenStax, Rice University"),
    "speeches": Corpus(("us_speeches/train.jsonl.xz",), "public domain", "US government, nltk_data"),
    "shakespeare": Corpus(("tinyshakespeare/input.txt.xz",), "public domain", "karpathy/char-rnn"),
    "wikitext2": Corpus(("wikitext2/valid.txt.xz",), "CC BY-SA 3.0", "WikiText-2 (Wikipedia)"),
    "qmsum": Corpus(("qmsum_train/train.jsonl.xz",), "MIT", "Yale-LILY/QMSum"),
    "factbook": Corpus(("factbook/documents.jsonl.xz",), "CC0", "CIA World Factbook"),
    "factbook_passages": Corpus(("factbook/passages.jsonl.xz",), "CC0", "CIA World Factbook"),
    "factbook_qa": Corpus(("factbook/qa_train.jsonl.gz",), "CC0", "templates over the CIA World Factbook"),
    "squad_passages": Corpus(("rag_wiki/squad_passages.jsonl.gz",), "CC BY-SA 4.0", "SQuAD v1.1 (Wikipedia)"),
    "multihop_passages": Corpus(("rag_wiki/multihop_passages.jsonl.gz",), "CC BY-SA 4.0", "2Wiki, HotpotQA, MuSiQue"),
    "webquestions": Corpus(("rag_wiki/webquestions_train.jsonl.gz",), "CC BY 4.0", "WebQuestions"),
    "efficientqa": Corpus(("rag_wiki/efficientqa_dev.jsonl.gz",), "CC BY-SA 3.0", "EfficientQA, Google Research"),
    "gpteacher": Corpus(("gpteacher/*.jsonl.gz",), "MIT; written by GPT-4", "teknium1/GPTeacher", bundled=False),
    "arena_answers": Corpus(
        ("arena_answers/train.jsonl.xz",), "Apache-2.0; written by 19 models", "lmarena/arena-hard-auto", bundled=False
    ),
    "codealpaca": Corpus(
        ("codealpaca2k_noncommercial/train.jsonl.gz",), "CC BY-NC 4.0", "sahil280114/codealpaca", bundled=False
    ),
}


def corpus_files(name: str, root: Path) -> list[Path]:
    """The files of one corpus, in order.

    Raises:
        ConfigError: no corpus of this name.
        InputError: the data folder lacks it; the message says which file.
    """
    if name not in CORPORA:
        raise ConfigError(f"unknown corpus '{name}': {nearest(name, CORPORA)}")
    found: list[Path] = []
    for pattern in CORPORA[name].files:
        matches = sorted(root.glob(pattern))
        if not matches:
            raise InputError(f"{root}: has no {pattern} (corpus '{name}', {CORPORA[name].origin})")
        found += matches
    return found
