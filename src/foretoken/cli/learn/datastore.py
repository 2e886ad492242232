"""``foretoken datastore``: texts to retrieve drafts from, tokenised, sorted and memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.shared.console import display, emit, emit_json, quiet_transformers
from foretoken.cli.shared.options import Verbose, check_model_name, json_option, out_option
from foretoken.core.errors import InputError, ModelError
from foretoken.core.files import check_readable

if TYPE_CHECKING:
    from foretoken.drafting.datastore.build import Report
    from foretoken.drafting.datastore.layout import Manifest

_TOGETHER = 64  # documents that are tokenised in one call

app = typer.Typer(
    name="datastore",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Texts to retrieve drafts from, for the methods that take [bold]datastore=DIR[/bold].",
)

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILES", help="JSON Lines of chats or texts, or plain text; .gz and .xz are read through."),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A datastore.")]
AsJson = Annotated[bool, json_option("What there is now as one JSON object on stdout.")]


@app.callback(epilog="Example: foretoken datastore build chats.jsonl --model zoo:base --out store")
def root() -> None:
    """Texts to retrieve drafts from, for the methods that take datastore=DIR."""


@app.command("build")
def build(
    context: typer.Context,
    files: Files,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="Model with the tokenizer: a folder, a hub id, or zoo:NAME."
        ),
    ],
    out: Annotated[Path, out_option("Folder to make.")],
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Make a datastore: tokenise documents and sort all their suffixes.

    It takes 6 bytes of disk a token (8 for vocabularies from 65,536 entries
    on) and at most 0.7 GB of memory next to the libraries, whatever the size of
    the corpus. Build it from text that the answers resemble, best from earlier
    answers of the same model; never from the prompts of a measurement.

    [bold]Example[/bold]

      foretoken datastore build chats.jsonl --model zoo:base --out store

      foretoken generate "Hello!" --model zoo:base --method rest --set datastore=store
    """
    from foretoken.drafting.datastore import build as making
    from foretoken.drafting.datastore.layout import Manifest
    from foretoken.models.fingerprint import vocabulary_fingerprint

    _check_files(files)
    tokenizer = _tokenizer(model, verbose)
    manifest = Manifest(_entries(tokenizer), vocabulary_fingerprint(tokenizer), model)
    with _progress("building") as report:
        made = making.build(_documents(files, tokenizer), out, manifest, entry=_entry(context, files), report=report)
    _say(out, made, as_json)


@app.command("append")
def append(
    context: typer.Context,
    folder: Folder,
    files: Files,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="Model with the tokenizer.", show_default="the one it was built with"
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Add documents to a datastore; if the command is killed, the datastore is unchanged.

    [bold]Example[/bold]

      foretoken datastore append store more.jsonl
    """
    from foretoken.drafting.datastore import build as making
    from foretoken.drafting.datastore.layout import read_manifest
    from foretoken.drafting.datastore.search import Datastore
    from foretoken.models.fingerprint import vocabulary_fingerprint

    _check_files(files)
    name = model or read_manifest(folder).model
    tokenizer = _tokenizer(name, verbose)
    Datastore(folder).check(vocabulary_fingerprint(tokenizer), name)
    with _progress("appending") as report:
        made = making.append(_documents(files, tokenizer), folder, entry=_entry(context, files), report=report)
    _say(folder, made, as_json)


@app.command("info")
def info(
    folder: Folder,
    check: Annotated[bool, typer.Option("--check", help="Read all of it, and compare with its checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a datastore holds and where it came from.

    [bold]Example[/bold]

      foretoken datastore info store --check
    """
    from foretoken.drafting.datastore.layout import damaged_files, read_manifest

    manifest = read_manifest(folder)
    if check and (damaged := damaged_files(folder, manifest)):
        names = ", ".join(path.name for path in damaged)
        raise InputError(f"{folder}: {names} changed since it was written; build the datastore again")
    _say(folder, manifest, as_json)


def _check_files(files: Sequence[Path]) -> None:
    for path in files:
        check_readable(path)


def _tokenizer(model: str, verbose: bool) -> Any:
    from foretoken.models.load import load_tokenizer

    check_model_name(model)
    quiet_transformers(verbose)
    return load_tokenizer(model)


def _entries(tokenizer: Any) -> int:
    """One more than the largest id: some vocabularies have gaps."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise ModelError("the tokenizer has no vocabulary")
    return int(largest) + 1


def _documents(files: Sequence[Path], tokenizer: Any) -> Iterator[list[int]]:
    from foretoken.data.documents import documents
    from foretoken.train.rendering import encoder

    encode = encoder(tokenizer)
    waiting: list[str] = []
    for path in files:
        for document in documents(path):
            waiting.append(document)
            if len(waiting) == _TOGETHER:
                yield from encode(waiting)
                waiting = []
    yield from encode(waiting)


def _entry(context: typer.Context, files: Sequence[Path]) -> dict[str, Any]:
    from foretoken.core.provenance import provenance

    return provenance(context.obj or [], files=[path.name for path in files])


@contextmanager
def _progress(title: str) -> Iterator[Report]:
    """Show the count so far."""
    with display(title) as show:
        yield lambda documents, tokens: show(f"{documents:,} documents, {tokens:,} tokens")


def _say(folder: Path, manifest: Manifest, as_json: bool) -> None:
    size = sum(path.stat().st_size for segment in manifest.segments for path in segment.paths(folder))
    found = {
        "folder": str(folder),
        "model": manifest.model,
        "vocab_size": manifest.vocab_size,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "segments": len(manifest.segments),
        "bytes": size,
        "history": list(manifest.history),
    }
    if as_json:
        emit_json(found)
        return
    emit(
        f"{folder}: {manifest.documents:,} documents, {manifest.tokens:,} tokens of '{manifest.model}' in "
        f"{len(manifest.segments)} segment{'s' if len(manifest.segments) != 1 else ''}, {size / 1e6:,.1f} MB"
    )
    for each in manifest.history:
        emit(f"  {each.get('date', '')}  {', '.join(each.get('files', []))}")
