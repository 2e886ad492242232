"""``foretoken rag``: answer questions with passages that are retrieved during generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.learn.training import counting
from foretoken.cli.run.answers import completion_fields
from foretoken.cli.shared.console import emit, emit_json, note, quiet_transformers
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import Loading, Model, Verbose, check_model_name, limit_option
from foretoken.cli.shared.settings import DEFAULT_MODEL, parse_settings
from foretoken.core.errors import ConfigError, nearest
from foretoken.data.prompts import Prompt, limit_per_category, read_prompts
from foretoken.options.sampling import SamplingParams

if TYPE_CHECKING:
    from foretoken_lab.rag.system import Answer, Rag

_RETRIEVAL, _FACE = "Retrieval", "Questions and output"


@with_flags
def rag(
    *,
    passages: Annotated[
        Path,
        typer.Option(
            "--passages",
            metavar="FILE",
            help="Passages: JSON Lines with 'text', optionally 'id' and 'title'; .gz and .xz work too.",
            rich_help_panel=_RETRIEVAL,
        ),
    ],
    questions: Annotated[
        Path,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="Questions: JSON Lines with 'prompt' or 'turns' (the first turn).",
            rich_help_panel=_FACE,
        ),
    ],
    model: Model = DEFAULT_MODEL,
    retriever: Annotated[
        str,
        typer.Option(
            "--retriever",
            help="flat or hnsw (vectors, by faiss), bm25 (words), knn (kNN-LM over the passages' tokens).",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = "flat",
    method: Annotated[
        str,
        typer.Option(
            "--method", help="sequential, or ralmspec: the same text with fewer searches.", rich_help_panel=_RETRIEVAL
        ),
    ] = "ralmspec",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="every, query_tokens, document_tokens, timeout, on_failure, stride, prefetch, asynchronous; of knn "
            "neighbours, weight, temperature, locality. Repeatable.",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            metavar="FOLDER",
            help="Sentence-transformers or transformers encoder, for flat and hnsw.",
            show_default="the mean of the model's last hidden states",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            "--index",
            metavar="DIR",
            help="Folder that stores the passages' vectors for later runs.",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    params: Annotated[SamplingParams, Flags(_FACE, ("max_tokens", "ignore_eos"))],
    limit: Annotated[int | None, limit_option(_FACE, "Maximum questions per category.")] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object per question on stdout, and nothing else.", rich_help_panel=_FACE
        ),
    ] = False,
    loading: Loading,
    verbose: Verbose = False,
) -> int:
    """Answer questions with passages that are retrieved anew every few tokens.

    --method sequential searches, generates four tokens with the best passage in front, and searches again. --method
    ralmspec guesses the passage from the results of earlier searches, continues to generate, and verifies many guesses
    with one concurrent search: the same text, token for token.

    [bold]Examples[/bold]

      foretoken rag --passages passages.jsonl --questions questions.jsonl --retriever bm25

      foretoken rag --passages passages.jsonl --questions questions.jsonl --encoder FOLDER --index vectors

      foretoken rag --passages passages.jsonl --questions questions.jsonl --method sequential --json
    """
    from foretoken_lab.rag.config import KNN, RagConfig, check_names
    from foretoken_lab.rag.passages import read_passages

    settings = parse_settings(sets or [])
    known = [each.name for each in fields(RagConfig)]
    for key in settings:
        if key not in known:
            raise ConfigError(f"unknown option '{key}': {nearest(key, known)}")
        if key in KNN and retriever != "knn":
            raise ConfigError(f"--set {key}=… has no effect with --retriever {retriever}: leave it out, or use knn")
    config = RagConfig(**settings)
    check_names(retriever, method)
    for name, value in (("--encoder", encoder), ("--index", index)):
        if value is not None and retriever not in ("flat", "hnsw"):
            raise ConfigError(f"{name} has no effect with --retriever {retriever}: leave it out, or use flat or hnsw")
    check_model_name(model)
    records = limit_per_category(read_prompts(questions), limit)
    found = read_passages(passages)
    quiet_transformers(verbose)
    import torch

    from foretoken.models.load import load
    from foretoken_lab.rag.encoders import FolderEncoder
    from foretoken_lab.rag.system import Rag

    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    target = load(model, **loading.of_a_checkpoint)
    with counting("reading passages", len(found)) as report:
        system = Rag(
            target,
            found,
            retriever=retriever,
            method=method,
            config=config,
            encoder=None if encoder is None else FolderEncoder(encoder),
            index=index,
            report=report,
        )
    return _answer(system, records, params, json=json)


def _answer(system: Rag, records: Sequence[Prompt], params: SamplingParams, *, json: bool) -> int:
    answers: list[Answer] = []
    texts = [record.text for record in records]
    written = system.generate(texts, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
    for record, answer in zip(records, written, strict=True):
        answers.append(answer)
        if json:
            counts = answer.counts.fields()
            emit_json({"id": record.id, "prompt": record.text, **completion_fields(answer.completion), **counts})
        else:
            if len(records) > 1:
                emit(f"=== {len(answers)}/{len(records)} {' '.join(record.text.split())}")
            emit(answer.text)
        if answer.completion.error:
            note(f"error: question {record.id}: {answer.completion.error}")
        elif answer.counts.failed:
            note(f"question {record.id} continued without searches: {answer.counts.failed}")
    if not json:
        note(_statistics(answers))
    return int(any(answer.completion.error for answer in answers))


def _statistics(answers: Sequence[Answer]) -> str:
    tokens = sum(len(each.token_ids) for each in answers)
    seconds = sum(each.completion.metrics.seconds for each in answers)
    total = {name: sum(getattr(each.counts, name) for each in answers) for name in (
        "retrievals", "queries", "guesses", "right_guesses", "rollbacks", "recomputed_rows", "waited_seconds"
    )}  # fmt: skip
    parts = [
        f"{tokens} tokens in {seconds:.2f} s",
        f"{total['retrievals']} searches of {total['queries']} queries",
        f"waited {total['waited_seconds'] / seconds if seconds else 0:.0%} of the time",
    ]
    if total["guesses"]:
        parts.append(f"{total['right_guesses'] / total['guesses']:.0%} of {total['guesses']} guesses right")
        parts.append(f"{total['rollbacks']} rollbacks")
    parts.append(f"{total['recomputed_rows']} rows recomputed")
    return " · ".join(parts)
