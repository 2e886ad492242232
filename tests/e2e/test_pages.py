"""Every page keeps its word: each shell line and each Python block is run, or the page's source says why not.

A block that is not run as it stands has a comment above its fence, which readers do not see::

    <!-- not run: needs a GPU -->
    <!-- slow: trains a head -->

Method cards are counted by the word and have none: they measure, which is slow, but for those in ``CARDS`` below.
Slow blocks run with ``-m slow``, shortened where the command has an option for it. README, quickstart and the pages
next to them are also run line by line, as a person runs them: test_readme.py.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from foretoken import zoo
from foretoken.catalog import entries
from foretoken.cli.main import app, main
from foretoken.data.prompts import BUNDLED_SUITE, read_prompts

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE_BY_LINE = ("README.md", "quickstart.md", "coming_from.md", "serve.md", "extend.md")  # other tests run these
LANGUAGES = {"bash", "console", "python", "toml", "json", ""}
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|slow): (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.M | re.S
)
SHELL = re.compile(r"^\$? ?(?:echo .*\| )?(?:foretoken|python|pip|curl|make|git|mkdocs) ", re.M)
CARDS = {
    "del": ("not run", "needs the corpora"),
    "diffuspec": ("not run", "a script of the repository, for minutes"),
    "dovetail": ("not run", "needs the corpora"),
    "longspec": ("", ""),
    "mtp": ("not run", "needs that checkpoint"),
    "scylla": ("not run", "needs the corpora"),
    "sparse_verification": ("not run", "takes an hour"),
    "stree": ("", ""),
    "vocabtrim": ("not run", "needs the corpora"),
}
# what would take minutes is shortened: (command, option and value); a value that the page gives is replaced
SHORTER = (
    ("train features", "--tokens 600"),
    ("train judge", "--minutes 0.5"),  # fewer than 50 tokens of a kind are refused
    ("train sprinter", "--minutes 0.05"),
    ("train", "--tokens 2048"),
    ("bench verify", "--repeats 1"),
    ("bench", "--limit 1 --repeats 1 --max-tokens 8"),
    ("eval --model zoo:draft --dtype int8 --against", "--text-tokens 256"),
    ("eval", "--limit 2 --text-tokens 256"),
    ("analyze acceptance", "--limit 1 --positions 2 --max-tokens 8"),
    ("analyze tradeoff", "--limit 1 --repeats 1 --max-tokens 8"),
    ("rag", "--max-tokens 4"),
    ("generate", "--max-tokens 8"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where, in which language, and why it is not run or not always."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Shell lines, without the prompt of a console, with continued lines put together."""
        if self.language not in ("bash", "console"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    card = CARDS.get(page.stem, ("slow", "measures")) if page.parent.name == "methods" else None
    return [
        Block(
            page,
            text[: found.start()].count("\n") + 1,
            found["language"],
            found["text"],
            *(card or (found["mark"] or "", found["reason"] or "")),
        )
        for found in FENCE.finditer(text)
    ]


EVERY = [block for page in PAGES for block in blocks(page)]
LINES = list(dict.fromkeys(line for block in EVERY for line in block.commands if line.startswith("foretoken ")))


@pytest.mark.parametrize("block", EVERY, ids=str)
def test_a_block_is_run_or_says_why_not(block):
    assert block.language in LANGUAGES, f"{block}: is '{block.language}' run or not?"
    if block.language == "":
        assert not SHELL.search(block.text), f"{block}: commands are bash or console"
    if block.language in ("console", "toml", "json"):
        assert block.mark == "not run", f"{block}: nobody runs this; say why above it: <!-- not run: REASON -->"


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_understood(line):
    """Commands, options and methods are there; nothing is run."""
    command, given = _parser()
    given.clear()
    command.main(shlex.split(line.partition(" > ")[0], comments=True)[1:], prog_name="foretoken", standalone_mode=False)
    named = [given.get("method"), *str(given.get("methods") or "").split(",")]
    known = {entry.name for entry in entries("drafter")} | {"sequential", "ralmspec"}
    assert {name.partition("+")[0] for name in named if name} <= known


@functools.cache
def _parser() -> tuple[Any, dict[str, Any]]:
    """The whole command line, and where it leaves what it was given instead of doing anything."""
    command = typer.main.get_command(app)
    given: dict[str, Any] = {}
    _replace_callbacks(command, lambda **options: given.update(options))
    return command, given


def _replace_callbacks(command: Any, callback: Callable[..., None]) -> None:
    command.callback = callback
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            _replace_callbacks(command.get_command(None, name), callback)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place with the files that the pages name."""
    prompts = [prompt.text for prompt in read_prompts(BUNDLED_SUITE)]
    chats = [{"prompt": each, "response": f"You asked: {each} The answer is {n}."} for n, each in enumerate(prompts)]
    files = {
        ("my.jsonl", "my-chats.jsonl", "chats.jsonl", "more.jsonl"): chats,
        ("question.jsonl", "questions.jsonl", "FILE.jsonl", "my_prompts.jsonl"): [
            {"prompt": each} for each in prompts[:3]
        ],
        ("passages.jsonl",): [{"id": str(n), "text": each} for n, each in enumerate(prompts)],
        ("requests.jsonl",): [
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 4}}
        ],
    }
    for names, records in files.items():
        for name in names:
            (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "wiki.txt").write_text("\n".join(prompts * 3))
    for name, model in {"big": "base", "small": "draft", "my-model": "base"}.items():
        shutil.copytree(zoo.path(model), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUN = [block for block in EVERY if block.language in ("bash", "python") and block.page.name not in LINE_BY_LINE]


def pages_with(mark: str) -> list[str]:
    """Of which some block has this mark."""
    return list(dict.fromkeys(str(b.page.relative_to(ROOT)) for b in RUN if b.mark == mark))


@pytest.mark.parametrize("page", pages_with(""))
def test_a_page_runs(page, folder):
    assert failing([block for block in RUN if block.page == ROOT / page and not block.mark]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.page == page and b.mark == "slow" for b in RUN)], ids=str
)
def test_a_long_page_runs(page, folder):
    assert failing([block for block in RUN if block.page == ROOT / page and block.mark != "not run"]) == []


def failing(chosen: Iterable[Block]) -> list[str]:
    """The lines that do not end with 0, in the order of the page; a Python block that raises fails at once.

    Names of a Python block are known to the next.
    """
    names: dict[str, object] = {}
    failed = []
    for block in chosen:
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        for line in block.commands:
            arguments = shlex.split(shortened(line).partition(" > ")[0], comments=True)
            if arguments[0] != "foretoken":
                assert arguments[0] in ("pip", "make", "git", "cd"), f"{block}: {line}"  # .ci/run makes the environment
            elif (code := main(arguments[1:])) != 0:
                failed.append(f"{block}: {line}: exit code {code}")
    return failed


def test_a_line_that_fails_is_found(folder):
    block = Block(ROOT / "README.md", 1, "bash", "foretoken zoo list\nforetoken zoo path nothing\n", "", "")
    assert failing([block]) == ["README.md:1: foretoken zoo path nothing: exit code 2"]


def shortened(line: str) -> str:
    """A line that takes seconds where the page's takes minutes."""
    begins = line.removeprefix("foretoken ")
    options = next((options for command, options in SHORTER if begins.startswith(command)), "")
    for option, value in re.findall(r"(--[\w-]+) (\S+)", options):
        line = re.sub(rf" {option} \S+", "", line) + f" {option} {value}"
    return line
