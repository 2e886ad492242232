"""``foretoken analyze scaling``: how a drafting head grows with its training, its layers and the batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.bench.suite import fingerprint, is_file, read_suite
from foretoken.cli.learn.training import progress
from foretoken.cli.shared.console import emit, emit_json, note, quiet_transformers
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import (
    Model,
    Verbose,
    check_model_name,
    data_option,
    json_option,
    limit_option,
    out_option,
    repeats_option,
    suite_option,
)
from foretoken.cli.shared.outputs import check_pictures, write_json, write_text
from foretoken.cli.shared.settings import DEFAULT_MODEL, parse_numbers
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.files import check_folder, check_writable
from foretoken.data.folder import check_one_text
from foretoken.data.prompts import limit_per_category
from foretoken.options.model import ModelOptions
from foretoken.train.command import WIDEST
from foretoken.train.stopping import stoppable

if TYPE_CHECKING:
    from foretoken_lab.studies.scaling.study import Study

_SWEEP, _HEADS, _OUTPUT = "Sweep", "Heads", "Output"
_MOST = {"--layers": 32, "--batch-size": 256, "--nodes": 256}
_RESULT = "scaling.json"


@with_flags
def scaling(
    *,
    context: typer.Context,
    out: Annotated[Path, out_option("Folder to make; give it again to go on after a stop.", _OUTPUT)],
    target: Model = DEFAULT_MODEL,
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="N,…", help="Training tokens of heads.", rich_help_panel=_SWEEP)
    ] = "65536,131072,262144,524288,1048576",
    layers: Annotated[
        str,
        typer.Option(
            "--layers", metavar="N,…", help="Decoder layers; the first is that of --tokens.", rich_help_panel=_SWEEP
        ),
    ] = "1,2,3,4",
    batches: Annotated[
        str, typer.Option("--batch-size", metavar="N,…", help="Prompts that run together.", rich_help_panel=_SWEEP)
    ] = "1,2,4,8",
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", metavar="N,…", help="Nodes of a draft; acceptance is that of the most.", rich_help_panel=_SWEEP
        ),
    ] = "2,4,8,16",
    max_depth: Annotated[int, typer.Option("--max-depth", min=1, help="Longest path.", rich_help_panel=_SWEEP)] = 6,
    width: Annotated[
        int, typer.Option("--width", min=1, help="Nodes expanded at a level.", rich_help_panel=_SWEEP)
    ] = 8,
    suite: Annotated[str | None, suite_option(_SWEEP)] = None,
    limit: Annotated[int | None, limit_option(_SWEEP, "Prompts per category at most, not in all.")] = None,
    answer: Annotated[
        int, typer.Option("--max-tokens", min=8, help="Tokens of an answer at most.", rich_help_panel=_SWEEP)
    ] = 64,
    repeats: Annotated[int, repeats_option("Timed runs of each setting.", _SWEEP)] = 3,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus",
            metavar="FILE",
            help="FILE or FILE=SHARE: your own text, or stored outputs; 'generated': tasks, no file. Repeatable.",
            rich_help_panel=_HEADS,
        ),
    ] = None,
    data: Annotated[Path | None, data_option(_HEADS)] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab-size", min=1, help="Tokens that a head scores; default: 2048.", rich_help_panel=_HEADS
        ),
    ] = None,
    mlp_width: Annotated[
        int | None,
        typer.Option(
            "--mlp-width",
            min=32,
            max=WIDEST,
            help="Channels of a layer's MLP; default: a quarter of the target's.",
            rich_help_panel=_HEADS,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights and order.", rich_help_panel=_HEADS)] = 0,
    loading: Annotated[ModelOptions, Flags("Model", ("threads",))],
    json: Annotated[bool, json_option("Print the fits as one JSON object on stdout, no text.", _OUTPUT)] = False,
    pictures: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Write a picture.", rich_help_panel=_OUTPUT)
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Train Scylla heads of several sizes, and fit how acceptance grows with tokens, layers and batch.

    Heads of every number of tokens are trained with the first number of
    layers, then heads of every number of layers with the most tokens. Each
    drafts the same prompts at temperature 0; the latter are timed for every
    batch. Everything measured is kept in the folder; a stopped sweep goes on
    with the same command, and a finished one is only fitted again.

    [bold]Examples[/bold]

      foretoken analyze scaling --out sweep

      foretoken analyze scaling --model ./big --corpus chats.jsonl --tokens 1e6,2e6,4e6,8e6 --out sweep
    """
    check_model_name(target)
    lists = {
        "--tokens": _whole(tokens, "--tokens"),
        "--layers": _whole(layers, "--layers"),
        "--batch-size": _whole(batches, "--batch-size"),
        "--nodes": _whole(nodes, "--nodes"),
    }
    if pictures is not None:
        check_writable(pictures, "--picture")
        check_pictures("--picture")
    check_folder(out, "--out")
    if suite is None or is_file(suite):  # else --data is for the suite, too
        check_one_text(data, corpus)
    prompts = limit_per_category(read_suite(suite, data), limit)

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.data.folder import data_root
    from foretoken.engine.llm import LLM
    from foretoken.models.fingerprint import fingerprint_of
    from foretoken.train import sources
    from foretoken_lab.recipes.base import mixture
    from foretoken_lab.studies.scaling.study import study
    from foretoken_lab.studies.scaling.sweep import Sweep, run

    quiet_transformers(verbose)
    text = sources.parse_all(corpus) if corpus else mixture(data_root(data))
    llm = LLM(target, speculative_config={"method": "none"}, device="cpu", threads=loading.threads)
    try:
        read = [_ids(llm, prompt.text) for prompt in prompts]
        fitting = [ids for ids in read if len(ids) + answer <= llm.target.max_length]
        if not fitting:
            raise InputError(f"with an answer of {answer} tokens no prompt fits the context; lower --max-tokens")
        sweep = Sweep(
            target=target,
            target_fingerprint=fingerprint_of(llm.target.source),
            tokens=lists["--tokens"],
            layers=lists["--layers"],
            batches=lists["--batch-size"],
            nodes=lists["--nodes"],
            max_depth=max_depth,
            width=width,
            draft_vocab_size=draft_vocab_size,
            mlp_width=mlp_width,
            prompts=f"{len(fitting)} of sha256 {fingerprint(suite, prompts)}",
            answer=answer,
            repeats=repeats,
            text=tuple(f"{source.name} {source.share:g}" for source in text),
            seed=seed,
            dtype=llm.target.precision,
            threads=torch.get_num_threads(),
        )
        with stoppable(), progress("training a head") as report:
            points = run(sweep, llm, fitting, text, out, report=report, say=note)
    finally:
        llm.close()
    found = study(points, sweep.layers[0], sweep.tokens[-1])
    facts = provenance(context.find_root().obj or [], sweep=sweep.fields())
    record = {"provenance": facts, **found.fields()}
    if json:
        emit_json(record)
    else:
        for line in _in_words(found):
            emit(line)
    write_json(out / _RESULT, record)
    if pictures is not None:
        from foretoken_lab.studies.scaling.pictures import draw

        write_text(pictures, draw(found, f"{target}, {len(fitting)} prompts"))
    return 0


def _whole(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers, increasing; 1e6 is one."""
    found = parse_numbers(text, option, float)
    most = _MOST.get(option, 10**15)
    if any(not 1 <= each <= most or each != int(each) for each in found):
        raise ConfigError(f"{option} {text}: whole numbers from 1 to {most}")
    return tuple(sorted({int(each) for each in found}))


def _ids(llm: Any, text: str) -> list[int]:
    if llm.is_chat_model:
        ids: list[int] = llm.chat_prompt([{"role": "user", "content": text}])["prompt_token_ids"]
        return ids
    return list(llm.tokenizer(text)["input_ids"])


def _in_words(found: Study) -> list[str]:
    lines = ["layers  tokens      parameters  tokens per step by nodes"]
    for point in found.points:
        gains = ", ".join(f"{nodes}: {gain:.2f}" for nodes, gain in sorted(point.accepted.items()))
        lines.append(f"{point.layers:6}  {point.trained:10,}  {point.parameters:10,}  {gains}")
    for fit in found.fits.values():
        low, high = fit.without_one["a"]
        held = fit.held_out
        lines += [
            f"{fit.law}: {fit.form}: a = {fit.a:.4g} ({low:.4g} to {high:.4g} without one point), b = {fit.b:.4g}, "
            + ("no variance to explain" if fit.r2 is None else f"R² {fit.r2:.3f}"),
            f"    measured for {min(fit.xs):g} to {max(fit.xs):g}; the largest, from the others: "
            f"{held['predicted']:.4g}, measured {held['measured']:.4g}",
        ]
        if fit.saturates:
            lines.append(f"    bends: it stops growing near {fit.knee:g}; do not extrapolate")
    lines += [f"{name}: not fitted, {reason}" for name, reason in found.left_out.items()]
    for each in found.speed.best:
        modelled, measured = each["predicted"], each["measured"]
        plain = "" if each["plain"] is None else f"; plain decoding {each['plain']:.0f}"
        lines.append(
            f"{each['batch']} requests: fastest by the model {modelled['layers']} layers and {modelled['nodes']} nodes "
            f"({modelled['predicted']:.0f} tokens per second), measured {measured['layers']} and {measured['nodes']} "
            f"({measured['measured']:.0f}){plain}"
        )
    if found.speed.error is not None:
        lines.append(f"speed model: half of the settings are off by at most {found.speed.error:.0%}")
    return lines
