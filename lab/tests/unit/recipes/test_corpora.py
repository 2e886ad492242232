"""The table of corpora, and what its licences ask of the recipes: nothing that may not be given away is read."""

from __future__ import annotations

import fnmatch
import gzip
import itertools
import json
import lzma
import os
from pathlib import Path

import pytest

from foretoken.core.errors import ConfigError, InputError
from foretoken.data import readers
from foretoken.data.folder import ENVIRONMENT
from foretoken.train.mixture import Source
from foretoken_lab import recipes
from foretoken_lab.recipes import sources as train_sources
from foretoken_lab.recipes.corpora import CORPORA, corpus_files
from foretoken_lab.tasks.example import prompt_hash
from foretoken_lab.tasks.training import TASKS

FORBIDDEN = ("rag_wiki/squad_passages*", "eval/*")  # what is asked in evaluations is not trained on


@pytest.fixture(scope="module")
def root() -> Path:
    named = os.environ.get(ENVIRONMENT)
    found = Path(named) if named else Path(__file__).resolve().parents[5] / "shared" / "data"
    if not found.is_dir():
        pytest.skip(f"the folder of the corpora is not here: {ENVIRONMENT} is not set, and there is no {found}")
    return found


def corpora_of(files: set[Path], root: Path) -> set[str]:
    """The names of the corpora that files belong to; fails for a file that is in none."""
    found = set()
    for path in files:
        place = path.relative_to(root).as_posix()
        names = {name for name, each in CORPORA.items() if any(fnmatch.fnmatch(place, p) for p in each.files)}
        assert len(names) == 1, f"{place} is a file of {sorted(names) or 'no corpus'}"
        found |= names
    return found


def may_be_given_away(files: set[Path], root: Path) -> bool:
    return all(CORPORA[name].bundled for name in corpora_of(files, root))


def opened_by(sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The files that reading from sources opens, whatever the sources say about themselves."""
    opened = set()
    real = readers.open_bytes

    def record(path):
        opened.add(path)
        return real(path)

    monkeypatch.setattr(readers, "open_bytes", record)
    for source in sources:
        assert len(list(itertools.islice(source.documents(), 3))) == 3
    return opened


@pytest.mark.parametrize("name", CORPORA)
def test_the_files_of_every_corpus_exist(name, root):
    assert corpus_files(name, root)


@pytest.mark.parametrize("name", recipes.NAMES)
def test_every_recipe_reads_only_what_may_be_given_away(name, root, monkeypatch):
    sources = recipes.find(name).sources(root)
    declared = {path for source in sources for path in source.files}
    assert may_be_given_away(declared, root)
    for path in declared:
        assert not any(fnmatch.fnmatch(path.relative_to(root).as_posix(), pattern) for pattern in FORBIDDEN)
    for source in sources:
        # reflections are on tasks; the others are pieces of two of them
        pieces = ("sums", "problems", "readings", "retellings")
        generated = source.name.removeprefix("reflect_") in (*TASKS, *pieces)
        assert source.files or generated, f"{source.name} does not say what it reads"
    assert opened_by(sources, monkeypatch) <= declared


@pytest.mark.parametrize("name", ["arena_answers", "gpteacher", "codealpaca"])
def test_the_test_above_would_catch_what_may_not(name, root, monkeypatch):
    sources = [*recipes.find("base").sources(root), train_sources.corpus(name, 0.1, root)]
    assert not may_be_given_away({path for source in sources for path in source.files}, root)
    hidden = Source("hidden", 0.1, sources[-1].documents)  # does not say what it reads
    assert not may_be_given_away(opened_by([hidden], monkeypatch), root)


def test_a_file_of_no_corpus_is_noticed(root):
    with pytest.raises(AssertionError, match="no corpus"):
        corpora_of({root / "eval" / "squad_dev.jsonl.gz"}, root)


def write(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    compress = gzip.compress if path.suffix == ".gz" else lzma.compress
    path.write_bytes(compress("".join(json.dumps(record) + "\n" for record in records).encode()))


@pytest.fixture
def made_up(tmp_path):
    """A factbook of 60 countries with a question each."""
    write(
        tmp_path / "factbook" / "passages.jsonl.xz",
        [{"id": f"factbook/c{n}/p/0", "text": f"The capital of Land{n} is City{n}."} for n in range(60)],
    )
    write(
        tmp_path / "factbook" / "qa_train.jsonl.gz",
        [
            {
                "id": f"factbook/c{n}/Capital",
                "messages": [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": f"City{n}"}],
                "passage_ids": [f"factbook/c{n}/p/0"],
            }
            for n in range(60)
        ],
    )
    return tmp_path


def test_the_unseen_countries_are_left_out(made_up, monkeypatch):
    unseen = {n for n in range(60) if int(prompt_hash(f"c{n}"), 16) % 4 == 0}
    assert 5 < len(unseen) < 30

    def countries():
        documents = list(train_sources.factbook(1.0, made_up).documents())
        return {n for n in range(60) if any(f"Land{n} is City{n}." in document for document in documents)}

    assert countries() == set(range(60)) - unseen
    monkeypatch.setattr(train_sources, "read_country", lambda identity: True)
    assert countries() == set(range(60))  # the rule is what leaves them out


def test_unknown_and_missing_corpora(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'books'"):
        corpus_files("boks", tmp_path)
    with pytest.raises(InputError, match=r"has no books/part\*\.jsonl\.xz \(corpus 'books', mlschmitt"):
        corpus_files("books", tmp_path)
    (tmp_path / "books").mkdir()
    for number in (2, 0, 1):
        (tmp_path / "books" / f"part{number}.jsonl.xz").touch()
    assert [path.name[4] for path in corpus_files("books", tmp_path)] == ["0", "1", "2"]
