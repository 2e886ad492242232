"""``foretoken calibrate``: what a target's approximate modes have to know of it, measured on text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.console import emit_json, note, quiet_transformers
from foretoken.cli.options import Device, Dtype, Threads, TrustRemoteCode, Verbose, check_model_name, check_placement
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.files import check_writable

if TYPE_CHECKING:
    from foretoken.methods.sparse.calibration import Calibration

app = typer.Typer(
    name="calibrate",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure on text what an approximate mode has to know of a target.",
)


@app.callback(epilog="Example: foretoken calibrate sparse --model zoo:moe --data chats.jsonl --out sparse.json")
def root() -> None:
    """Measure on text what an approximate mode has to know of a target."""


@app.command("sparse")
def sparse(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help="A Hugging Face folder, a hub id, or zoo:NAME.")],
    data: Annotated[
        list[Path],
        typer.Option("--data", metavar="FILE", help="JSON Lines of chats or texts, or plain text. Repeatable."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where to write.", show_default="beside the model's weights"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Read so many tokens of the text.")] = 65536,
    block: Annotated[
        int | None,
        typer.Option("--block", min=2, help="Tokens of one context.", show_default="2048, or what the model holds"),
    ] = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure what sparse verification has to know: for verification.moe, reuse, and what ffn would save.

    One pass over the text, dense. Written down are the share of MLP channels
    below each threshold, the medians by which experts are left out, and the
    layers that pick blocks for their neighbours (contexts must be long enough
    to have blocks to pick from). The file is found by itself beside the
    weights, or named with verification.calibration=FILE; it fits this model
    only.

    [bold]Example[/bold]

      foretoken calibrate sparse --model zoo:moe --data chats.jsonl --out moe.json

      foretoken generate "Once" --model zoo:moe --set verification.moe=1 --set verification.calibration=moe.json
    """
    check_placement(dtype, device)
    check_model_name(model)
    for path in data:
        if not path.is_file():
            raise InputError(f"--data {path}: {'this is a folder, name a file' if path.is_dir() else 'no such file'}")
    if out is not None:
        check_writable(out, "--out")

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.methods.sparse.calibrate import blocks_of, calibrate
    from foretoken.methods.sparse.calibration import default_path
    from foretoken.models.load import load

    quiet_transformers(verbose)
    if threads is not None:
        torch.set_num_threads(threads)
    target = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if out is None:
        out = default_path(target)
        if not out.parent.is_dir():
            raise ConfigError(f"'{model}' does not lie in a folder of yours: say with --out where to write")
        check_writable(out, "--out")
    length = min(2048, target.max_length) if block is None else block
    found = calibrate(
        target,
        blocks_of(data, target, block=length, num_tokens=tokens),
        provenance=provenance(
            context.obj or [],
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            block=length,
            files=[path.name for path in data],
        ),
    )
    found.save(out)
    if as_json:
        emit_json(asdict(found))
    for line in _in_words(found):
        note(line)
    note(f"wrote {out}")


def _in_words(found: Calibration) -> list[str]:
    """What was found, for a person: what pays, and what does not."""
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
        anchors = found.attention.layers
        lines.append(
            f"reuse: {len(anchors)} of {len(found.attention.jaccard)} layers pick: {', '.join(map(str, anchors))}"
        )
        if len(anchors) == len(found.attention.jaccard):
            lines.append("reuse: no layer picks like the one before it, so nothing can be taken over")
    return lines
