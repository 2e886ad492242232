"""Where the documents of a recipe come from: corpora, generated tasks, and passages with questions made from them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from foretoken.data import documents as doc
from foretoken.train.mixture import Source, is_held_out
from foretoken.train.sources import GENERATED, from_files
from foretoken_lab.recipes.corpora import corpus_files
from foretoken_lab.records import read_records
from foretoken_lab.tasks import arithmetic, keys, profiles
from foretoken_lab.tasks.example import prompt_hash
from foretoken_lab.tasks.profiles import passage_prompt
from foretoken_lab.tasks.training import TASKS

PASSAGE_CHARACTERS = 900  # of a passage that is kept around the answer
UNSEEN_COUNTRIES = 4  # one country in so many is left out of every mixture

# seeds of the generated tasks; evaluation draws from the other half of each task whatever its seed
_SEED = 1
# the mixture of them alone: arithmetic and reading first, as in the zoo's own
_TURNS = {"arithmetic": 5, "profiles": 4, "keys": 1, "json": 1, "code": 1}
# characters of a document, keys in it: to look up is learnt where there is little else, and kept where there is much
_KEYS_HIDDEN = ((150, 2), (300, 4), (600, 8), (1500, 12), (3000, 24), (7000, 40))


def corpus(name: str, share: float, root: Path) -> Source:
    """A corpus of the table, its files one after the other."""
    return from_files(name, share, corpus_files(name, root))


def task(name: str, share: float) -> Source:
    """The training half of a generated task, without end."""

    def documents() -> Iterator[str]:
        return (doc.exchange(example.prompt, example.response) for example in TASKS[name](_SEED))

    return Source(name, share, documents)


def sums(share: float) -> Source:
    """Rows of bare sums, without end."""

    def documents() -> Iterator[str]:
        return (doc.exchange(*row) for row in arithmetic.sums(_SEED))

    return Source("sums", share, documents)


def readings(share: float) -> Source:
    """Passages of the task ``profiles`` with several questions each, of the training half, without end."""

    def documents() -> Iterator[str]:
        for first, *others in profiles.readings("train", _SEED):
            turns = [("user", first.prompt), ("assistant", first.response)]
            for each in others:
                question = each.prompt.removeprefix(first.prompt.split("\n\n")[0]).removeprefix("\n\n")
                turns += [("user", question), ("assistant", each.response)]
            yield doc.chat(turns)

    return Source("readings", share, documents)


def retellings(share: float) -> Source:
    """Passages on several things of a kind, one of which is repeated, then questions, without end."""

    def documents() -> Iterator[str]:
        for exchanges in profiles.retellings(_SEED):
            yield doc.chat([turn for asked, said in exchanges for turn in (("user", asked), ("assistant", said))])

    return Source("retellings", share, documents)


def problems(share: float, *categories: str) -> Source:
    """The training half of ``arithmetic``, of some of its categories alone, without end."""

    def documents() -> Iterator[str]:
        found = arithmetic.examples("train", _SEED + 1, categories)
        return (doc.exchange(example.prompt, example.response) for example in found)

    return Source("problems", share, documents)


def generated(share: float) -> Source:
    """All generated tasks by turns: text that needs no file."""

    def documents() -> Iterator[str]:
        rng = random.Random(_SEED)
        streams = {name: task(name, 1.0).documents() for name in _TURNS}
        while True:
            [name] = rng.choices(list(_TURNS), list(_TURNS.values()))
            yield next(streams[name])

    return Source(GENERATED, share, documents)


def read_country(identity: str) -> bool:
    """Whether a factbook record is of a country that mixtures may read; the others are for evaluation alone."""
    country = identity.split("/")[1]
    return int(prompt_hash(country), 16) % UNSEEN_COUNTRIES != 0


def factbook(share: float, root: Path) -> Source:
    """Questions about a country under the passage that answers them; without the unseen countries."""
    [questions], [passages] = corpus_files("factbook_qa", root), corpus_files("factbook_passages", root)

    def documents() -> Iterator[str]:
        texts = {record["id"]: record["text"] for record in read_records(passages, ("id", "text"))}
        for record in read_records(questions, ("id", "messages", "passage_ids")):
            question, answer = (message["content"] for message in record["messages"])
            found = next((texts[i] for i in record["passage_ids"] if answer in texts.get(i, "")), None)
            if found and read_country(record["id"]):
                yield doc.exchange(passage_prompt(around(found, answer), question), answer)

    return Source("factbook_read", share, documents, (questions, passages))


def cloze(name: str, share: float, root: Path) -> Source:
    """Real passages of a corpus with a gap to fill from the passage: a name or a number.

    The corpus is prose. A sentence is repeated as the question with one name or number of it left out, so the answer
    has to be found and copied, as in extractive question answering.
    """
    files = corpus_files(name, root)

    def documents() -> Iterator[str]:
        rng = random.Random(_SEED)
        for path in files:
            for document in doc.documents(path):
                for paragraph in _detokenised(document).split("\n"):
                    if 200 <= len(paragraph) <= PASSAGE_CHARACTERS and (made := _cloze(rng, paragraph)):
                        yield made

    return Source(f"{name}_cloze", share, documents, tuple(files))


def hidden_keys(share: float, root: Path) -> Source:
    """Pages of books with keys hidden in them, and questions about all of them at the end.

    Many keys in little text as well as few in much: looking up is learnt from the answers, far distance from the rest.
    """
    files = corpus_files("books", root)

    def documents() -> Iterator[str]:
        rng = random.Random(_SEED)
        pages = _pages(files)
        generators = [
            keys.examples("train", _SEED, length=length, num_keys=num_keys, filler=lambda r: next(pages))
            for length, num_keys in _KEYS_HIDDEN
        ]
        while True:
            example = next(rng.choice(generators))
            turns = [("user", example.prompt), ("assistant", example.response)]
            others = sorted(set(_KEY.findall(example.prompt)) - {(_ASKED.findall(example.prompt)[-1], example.answer)})
            for owner, number in rng.sample(others, len(others)):
                turns += [
                    ("user", f"What is the secret number of {owner}?"),
                    ("assistant", keys.key_line(owner, number)),
                ]
            yield doc.chat(turns)

    return Source("hidden_keys", share, documents, tuple(files))


def recall(share: float, root: Path) -> Source:
    """Pages of books, then some of their sentences again when their first words are given: far text to copy."""
    files = corpus_files("books", root)

    def documents() -> Iterator[str]:
        rng = random.Random(_SEED)
        pages = _pages(files)
        while True:
            passage = " ".join(next(pages) for _ in range(rng.randint(2, 8)))
            sentences = [s for s in _SENTENCE.split(passage) if 60 <= len(s) <= 240 and passage.count(s) == 1]
            if len(sentences) < 3:
                continue
            turns: list[tuple[str, str]] = []
            opening = passage + "\n\n"
            for sentence in rng.sample(sentences, 3):
                begins = " ".join(sentence.split(" ")[:5])
                turns += [("user", f'{opening}Which sentence begins with "{begins}"?'), ("assistant", sentence)]
                opening = ""
            yield doc.chat(turns)

    return Source("recall", share, documents, tuple(files))


def _pages(files: list[Path]) -> Iterator[str]:
    """Paragraphs of the training half of the books, without end."""
    while True:
        for path in files:
            for document in doc.documents(path):
                if not is_held_out(document):
                    yield from (line for line in doc.parts(document)[0][1].split("\n") if 200 <= len(line) <= 1500)


def around(passage: str, answer: str) -> str:
    """About ``PASSAGE_CHARACTERS`` of a passage with the answer in it, cut at spaces."""
    if len(passage) <= PASSAGE_CHARACTERS:
        return passage
    at = passage.index(answer)
    start = max(0, min(at - PASSAGE_CHARACTERS // 2, len(passage) - PASSAGE_CHARACTERS))
    if start:
        start = passage.rfind(" ", 0, start) + 1
    end = max(start + PASSAGE_CHARACTERS, at + len(answer))
    if end < len(passage):
        end = passage.find(" ", end) if " " in passage[end:] else len(passage)
    return passage[start:end]


_SPAN = re.compile(r"(?<![.!?] )(?<!^)\b(?:[A-Z][a-z]+(?: (?:of |the )?[A-Z][a-z]+)*|\d[\d,.]*\d|\d+)\b")
_KEY = re.compile(r"The secret number of (\w+) is (\d+)\.")
_ASKED = re.compile(r"What is the secret number of (\w+)\?")
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def _cloze(rng: random.Random, paragraph: str) -> str | None:
    sentences = [sentence for sentence in _SENTENCE.split(paragraph) if 40 <= len(sentence) <= 200]
    rng.shuffle(sentences)
    for sentence in sentences:
        spans = [match for match in _SPAN.finditer(sentence) if sentence.count(match.group()) == 1]
        if spans:
            span = rng.choice(spans)
            gap = f"{sentence[: span.start()]}____{sentence[span.end() :]}"
            return doc.exchange(passage_prompt(paragraph.strip(), f"Fill in the gap: {gap}"), span.group())
    return None


def _detokenised(text: str) -> str:
    """WikiText's tokens as prose: `` @-@ ``, spaces before punctuation, headings and unknown words undone."""
    text = re.sub(r" @(.)@ ", r"\1", text.replace("<unk>", "it"))
    text = re.sub(r" ([,.;:!?)%]|'s|n't)", r"\1", text)
    text = re.sub(r"\( ", "(", text)
    return re.sub(r"^ *=.*$", "", text, flags=re.M).replace(' " ', ' "')
