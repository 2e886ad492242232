"""``foretoken calibrate``: measure a model on text, for methods that need such statistics before they decode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from foretoken.cli.learn import calibrate_scylla
from foretoken.cli.learn.training import counting as counting_up
from foretoken.cli.shared.console import emit_json, note, quiet_transformers
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import (
    Model,
    Verbose,
    check_model_name,
    check_vocabulary,
    corpus_option,
    json_option,
    out_option,
)
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_folder, check_readable, check_writable
from foretoken.options.model import ModelOptions

if TYPE_CHECKING:
    from foretoken.methods.sparse.calibration import Calibration

T = TypeVar("T")

_CHECKED_DOCUMENTS = 10_000  # of each file, before a model is loaded for them

app = typer.Typer(
    name="calibrate",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what sparse verification, trimmed drafting and Scylla have to know of a model.",
)


@app.callback(epilog="Example: foretoken calibrate sparse --model zoo:moe --corpus chats.jsonl --out sparse.json")
def root() -> None:
    """Measure what sparse verification, trimmed drafting and Scylla have to know of a model."""


app.command("scylla")(calibrate_scylla.scylla)


@app.command("sparse")
@with_flags
def sparse(
    *,
    context: typer.Context,
    model: Model,
    corpus: Annotated[list[Path], corpus_option()],
    out: Annotated[Path | None, out_option("File to write.", show_default="next to the model's weights")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Read so many tokens of the text.")] = 65536,
    block: Annotated[
        int | None,
        typer.Option("--block", min=2, help="Tokens of one context.", show_default="2048, or what the model holds"),
    ] = None,
    loading: Annotated[ModelOptions, Flags("Model", but=("kv_cache_dtype",))],
    as_json: Annotated[bool, json_option("Print the measurements as one JSON object on stdout.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure what sparse verification has to know: for verification.moe, reuse, and what ffn would save.

    One pass over the text, dense. Written down are the share of MLP channels
    below each threshold, the medians by which experts are left out, and the
    layers that pick blocks for their neighbours (contexts must be long enough
    to have blocks to pick from). The file is found by itself next to the
    weights, or named with verification.calibration=FILE; it fits this model
    only.

    [bold]Example[/bold]

      foretoken calibrate sparse --model zoo:moe --corpus chats.jsonl --out moe.json

      foretoken generate "Once" --model zoo:moe --set verification.moe=1 --set verification.calibration=moe.json
    """
    check_model_name(model)
    _check_corpus(corpus)
    if out is not None:
        check_writable(out, "--out")
    _check_documents(corpus)

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.methods.sparse.calibrate import blocks_of, calibrate
    from foretoken.methods.sparse.calibration import default_path
    from foretoken.models.load import load

    quiet_transformers(verbose)
    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    target = load(model, **loading.of_a_checkpoint)
    if out is None:
        out = default_path(target)
        if not out.parent.is_dir():
            raise ConfigError(f"'{model}' does not lie in a folder of yours: say with --out where to write")
        check_writable(out, "--out")
    length = min(2048, target.max_length) if block is None else block
    blocks = blocks_of(corpus, target, block=length, num_tokens=tokens)
    found = calibrate(
        target,
        _counted(blocks, len, "tokens read", tokens),
        provenance=provenance(
            context.obj or [],
            dtype=target.precision,
            device=str(target.device),
            block=length,
            files=[path.name for path in corpus],
        ),
    )
    found.save(out)
    if as_json:
        emit_json(asdict(found))
    for line in _in_words(found):
        note(line)
    note(f"wrote {out}")


class Writer(str, Enum):
    """The author of the counted tokens."""

    raw = "raw"
    drafter = "drafter"
    target = "target"


@app.command("vocabulary")
@with_flags
def vocabulary(
    *,
    context: typer.Context,
    model: Model,
    corpus: Annotated[list[Path], corpus_option()],
    size: Annotated[int, typer.Option("--size", min=1, help="Tokens to keep, next to some that always are.")],
    out: Annotated[Path, out_option("Folder to make.")],
    writer: Annotated[
        Writer,
        typer.Option(
            "--writer",
            help="Text to count tokens in: the target's answers to the corpus (best), the draft model's, or the corpus "
            "itself (raw: in seconds).",
        ),
    ] = Writer.target,
    draft: Annotated[
        str | None,
        typer.Option("--draft-model", metavar="MODEL", help="With --writer drafter: the draft checkpoint that writes."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, help="Count so many at most.", show_default="50000 written, 2000000 raw"),
    ] = None,
    context_rows: Annotated[
        int,
        typer.Option(
            "--context-rows", min=0, max=4096, help="Other tokens of its own text that a request may draft, at most."
        ),
    ] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seeds the choice of texts, and the sampling.")] = 0,
    loading: Annotated[ModelOptions, Flags("Model", but=("kv_cache_dtype",))],
    as_json: Annotated[bool, json_option("Print the counts as one JSON object on stdout.")] = False,
    verbose: Verbose = False,
) -> None:
    """Choose the tokens that drafters score: the most frequent ones (VocabTrim).

    A drafter with a head of its own, or the target's, then reads only these
    rows of it for every token that it drafts. Four texts in five are counted;
    on the fifth the coverage is measured, the share of written tokens that
    could have been drafted. What ends a text, markers, digits and the line
    break are always kept. The folder fits every model with this tokenizer.

    [bold]Example[/bold]

      foretoken calibrate vocabulary --model zoo:base --corpus chats.jsonl --size 2048 --out kept

      foretoken generate "Once" --model zoo:base --method draft_model --set model=zoo:draft --set draft_vocab=kept
    """
    check_model_name(model)
    _check_corpus(corpus)
    if (draft is None) == (writer is Writer.drafter):
        raise ConfigError("--draft-model MODEL goes with --writer drafter, and only with that")
    if writer is Writer.raw and temperature:
        raise ConfigError(f"--temperature {temperature:g} does nothing with --writer raw: no model writes")

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.data.documents import documents
    from foretoken.drafting.draft_vocabulary import DraftVocabulary, check_place
    from foretoken.engine.llm import LLM
    from foretoken.models.fingerprint import vocabulary_fingerprint
    from foretoken.models.language_model import check_same_vocabulary
    from foretoken.models.load import load
    from foretoken.train import vocabulary as counting

    check_folder(out, "--out")
    check_place(out)
    _check_documents(corpus)
    if draft is not None:
        check_vocabulary(model, draft, **loading.origin)
    quiet_transformers(verbose)
    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    target = load(model, **loading.of_a_checkpoint)
    if size > target.vocab_size:
        raise ConfigError(f"--size {size}: '{model}' has {target.vocab_size} tokens")
    writing = target
    if draft is not None:
        writing = load(
            draft,
            dtype=loading.dtype,
            device=loading.device,
            trust_remote_code=loading.trust_remote_code,
        )
        reason = check_same_vocabulary(target, writing)
        if reason is not None:
            raise ConfigError(f"--draft-model {draft}: has another vocabulary than '{model}' ({reason})")
    read = counting.in_turn([documents(path) for path in corpus])
    if writer is Writer.raw:
        texts = counting.raw(read, target.tokenizer)
    else:
        llm = LLM.from_target(writing, seed=seed)
        texts = counting.generated(read, llm, length=96, temperature=temperature, seed=seed)
    most = tokens or (2_000_000 if writer is Writer.raw else 50_000)
    found = counting.choose(
        _counted(texts, lambda text: sum(text.counts), "tokens counted", most),
        size,
        target.vocab_size,
        counting.forced(target),
        tokens=most,
        context_rows=context_rows,
    )
    counted = {
        "text": writer.value,
        "tokens": found.num_tokens,
        "held_out_tokens": found.num_held_out,
        "coverage": found.coverage,
        "coverage_with_context_rows": found.with_context,
        "provenance": provenance(
            context.obj or [],
            dtype=target.precision,
            device=str(target.device),
            writer=writing.name,
            files=[path.name for path in corpus],
        ),
    }
    kept = DraftVocabulary(
        ids=found.ids,
        vocab_size=target.vocab_size,
        tokenizer=vocabulary_fingerprint(target.tokenizer),
        target=target.name,
        context_rows=context_rows,
        counted=counted,
    )
    kept.save(out)
    if as_json:
        emit_json({"draft_vocab_size": len(kept), "vocab_size": kept.vocab_size, **counted})
    note(f"{model}: {len(kept):,} of {kept.vocab_size:,} tokens kept, counted on {found.num_tokens:,} ({writer.value})")
    if found.coverage is None or found.with_context is None:
        note("coverage: nothing was held out to measure it on; give more texts")
    else:
        note(
            f"coverage of {found.num_held_out:,} held-out tokens: {found.coverage:.1%}, "
            f"with context rows {found.with_context:.1%}"
        )
        if found.with_context < counting.ENOUGH:
            note(f"that is below {counting.ENOUGH:.0%}: a larger --size, or text more like the drafts to come")
    note(f"wrote {out}: use it with --set draft_vocab={out}")


def _counted(pieces: Iterable[T], size: Callable[[T], int], title: str, total: int) -> Iterator[T]:
    """The same pieces; says how much has gone by, of about a total."""
    done = 0
    with counting_up(title, total) as report:
        for piece in pieces:
            yield piece
            done += size(piece)
            report(done)


def _check_corpus(corpus: Sequence[Path]) -> None:
    for path in corpus:
        check_readable(path, "--corpus")


def _check_documents(corpus: Sequence[Path]) -> None:
    """Read the first records of every file, so that a bad one is refused before a model is loaded for them."""
    from foretoken.data.documents import documents

    for path in corpus:
        for _ in itertools.islice(documents(path), _CHECKED_DOCUMENTS):
            pass


def _in_words(found: Calibration) -> list[str]:
    """The result as lines for the terminal: which settings pay."""
    lines = [f"{found.model}: {found.num_tokens:,} tokens read"]
    if found.ffn:
        rows = sorted(found.ffn[0].union)
        lines += [
            f"ffn={each.tau:g}: shut in one row {each.row:.1%}; in all of "
            + ", ".join(f"{n} rows {each.union[n]:.1%}" for n in rows[1:])
            + "; at best "
            + ", ".join(f"{each.speedup(n):.2f}x" for n in rows)
            + f" of an MLP at {', '.join(map(str, rows))} rows"
            for each in found.ffn
        ]
        if all(each.speedup(rows[-2]) < 1.05 for each in found.ffn if each.tau <= 0.1):
            lines.append(
                f"ffn: up to 0.1 it cannot pay for {rows[-2]} rows and more: together they need nearly everything"
            )
    else:
        lines.append("ffn: this model has no gated MLP, the setting will be refused")
    if found.moe is not None:
        median = [f"{layer}: {', '.join(f'{each:.2f}' for each in beta)}" for layer, beta in found.moe.beta.items()]
        lines.append(f"moe: {found.moe.num_chosen} experts a row; ratios by layer {'; '.join(median)}")
    if found.attention is None:
        lines.append("reuse: no context was long enough to pick blocks; give longer documents, or a larger --block")
    else:
        settings = found.attention.settings
        lines += [
            f"score={score}: of the attention that leaves the first and the last blocks, {settings['budget']:.0%} of "
            f"the prefix hold {shares['root']:.0%} for the root, {shares['draft']:.0%} for the rows after it"
            for score, shares in found.attention.caught.items()
        ]
        for sets in ("per_head", "per_layer"):
            anchors, depth = found.anchors_for(len(found.attention.jaccard), sets), len(found.attention.jaccard)
            text = f"reuse, {sets}: {len(anchors)} of {depth} layers pick: {', '.join(map(str, anchors))}"
            alike = "" if len(anchors) < depth else "; none picks like the one before it: nothing can be taken over"
            lines.append(text + alike)
    return lines
