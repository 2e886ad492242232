"""``foretoken calibrate sparse``: what sparse verification has to know of a model, measured on text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.shared.console import emit_json, note, quiet_transformers
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import Model, Verbose, check_model_name, json_option, out_option
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_writable
from foretoken.options.model import ModelOptions
from foretoken_lab.cli.calibrate_corpus import check_corpus, check_documents, counted
from foretoken_lab.cli.options import corpus_option

if TYPE_CHECKING:
    from foretoken.methods.sparse.calibration import Calibration


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
    check_corpus(corpus)
    if out is not None:
        check_writable(out, "--out")
    check_documents(corpus)

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.methods.sparse.calibration import default_path
    from foretoken.models.load import load
    from foretoken_lab.calibrations.sparse import blocks_of, calibrate

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
        counted(blocks, len, "tokens read", tokens),
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
