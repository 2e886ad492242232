"""``foretoken calibrate vocabulary``: the tokens that drafters score, counted in text."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.shared.console import emit_json, note, quiet_transformers
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import Model, Verbose, check_model_name, json_option, out_option
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_folder
from foretoken.options.model import ModelOptions
from foretoken_lab.cli.calibrate_corpus import check_corpus, check_documents, counted
from foretoken_lab.cli.options import corpus_option


class Writer(str, Enum):
    """The author of the counted tokens."""

    raw = "raw"
    drafter = "drafter"
    target = "target"


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
    check_corpus(corpus)
    if (draft is None) == (writer is Writer.drafter):
        raise ConfigError("--draft-model MODEL goes with --writer drafter, and only with that")
    if writer is Writer.raw and temperature:
        raise ConfigError(f"--temperature {temperature:g} does nothing with --writer raw: no model writes")

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.data.documents import documents
    from foretoken.drafting.draft_vocabulary import DraftVocabulary, check_place
    from foretoken.engine import before_weights
    from foretoken.engine.llm import LLM
    from foretoken.models.fingerprint import vocabulary_fingerprint
    from foretoken.models.load import load
    from foretoken.models.vocabulary import different_vocabulary
    from foretoken_lab.calibrations import vocabulary as counting

    check_folder(out, "--out")
    check_place(out)
    check_documents(corpus)
    if draft is not None:
        before_weights.check_vocabulary(model, draft, **loading.origin)
    quiet_transformers(verbose)
    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    target = load(model, **loading.of_a_checkpoint)
    if size > target.vocab_size:
        raise ConfigError(f"--size {size}: '{model}' has {target.vocab_size} tokens")
    writing = target
    if draft is not None:
        writing = load(draft, dtype=loading.dtype, device=loading.device, trust_remote_code=loading.trust_remote_code)
        reason = different_vocabulary(target.tokenizer, writing.tokenizer)
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
        counted(texts, lambda text: sum(text.counts), "tokens counted", most),
        size,
        target.vocab_size,
        counting.forced(target),
        tokens=most,
        context_rows=context_rows,
    )
    counts = {
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
        counted=counts,
    )
    kept.save(out)
    if as_json:
        emit_json({"draft_vocab_size": len(kept), "vocab_size": kept.vocab_size, **counts})
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
