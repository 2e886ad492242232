"""``foretoken bench verify``: the verification forward alone, plan against plan."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.shared.console import emit_json, emit_laid_out, progress_bar, quiet_transformers
from foretoken.cli.shared.flags import with_flags
from foretoken.cli.shared.options import (
    Loading,
    Model,
    Verbose,
    check_model_name,
    json_option,
    out_option,
    repeats_option,
)
from foretoken.cli.shared.outputs import check_outputs, write_json
from foretoken.cli.shared.settings import DEFAULT_MODEL, parse_numbers, parse_settings, split_settings
from foretoken.core.errors import ConfigError, nearest
from foretoken.data.prompts import BUNDLED_SUITE, read_prompts
from foretoken_lab.models.shapes import FAMILY_SHAPES, SHAPES, write_random_model
from foretoken_lab.models.shapes import PREFIX as SHAPE

if TYPE_CHECKING:
    from foretoken.models.language_model import LanguageModel

_PLANS = ("dense", "prefix_tree", "sparse")
_KEY = "verification."
_MOST_POSITIONS = 1 << 22  # what a machine could hold of the smallest models
_PLANS_PANEL, _MEASURE, _OUTPUT = "Plans", "Measuring", "Output"


@with_flags
def verify(
    *,
    arguments: typer.Context,
    model: Model = DEFAULT_MODEL,
    context: Annotated[
        str,
        typer.Option(
            "--context", metavar="N,…", help="Tokens of the prefix that was read before.", rich_help_panel=_MEASURE
        ),
    ] = "2048",
    rows: Annotated[
        str,
        typer.Option(
            "--rows",
            metavar="N,…",
            help="Rows of the forward: the last token, and the draft after it.",
            rich_help_panel=_MEASURE,
        ),
    ] = "8",
    plans: Annotated[
        str,
        typer.Option(
            "--plans",
            metavar="A,B,…",
            help="dense, prefix_tree, sparse; settings of an entry with '+': sparse+verification.budget=0.2.",
            rich_help_panel=_PLANS_PANEL,
        ),
    ] = "dense,sparse",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of every sparse plan, verification.NAME=VALUE. Repeatable.",
            rich_help_panel=_PLANS_PANEL,
        ),
    ] = None,
    repeats: Annotated[int, repeats_option("Forwards of each plan, interleaved.", _MEASURE)] = 20,
    fill: Annotated[
        str,
        typer.Option(
            "--fill",
            help="text: the model reads the context; random: random keys and values, at once.",
            rich_help_panel=_MEASURE,
        ),
    ] = "text",
    loading: Loading,
    json: Annotated[
        bool,
        json_option("Results and provenance as one JSON object on stdout, no table; --json FILE: as --out.", _OUTPUT),
    ] = False,
    out: Annotated[Path | None, out_option("Write the same JSON there, next to the table.", _OUTPUT)] = None,
    verbose: Verbose = False,
) -> None:
    """Time the target's verification forward, plan against plan: same rows, same prefix, interleaved.

    The context is the bundled prompts, repeated. prefix_tree with settings is
    sparse, too: prefix_tree+verification.budget=0.2. attention is the part of a
    forward in attention (storing keys, selecting and attending); read is the
    share of the context that heads read. A sparse plan is sparse here from
    the first token on, whatever it costs: verification.dense_below is 0 and
    verification.gate false if they are not set. --model
    shape:100m is a Llama shape with random weights, for times only.

    [bold]Examples[/bold]

      foretoken bench verify

      foretoken bench verify --model zoo:long --context 4096,8192 --rows 8,32 --set verification.budget=0.2

      foretoken bench verify --model shape:100m --fill random --context 8192

      foretoken bench verify --context 384 --plans dense,sparse+verification.ffn=0.1

      FORETOKEN_NATIVE=0 foretoken bench verify --context 4000 --rows 8,32 --plans dense,prefix_tree
    """
    contexts, counts = parse_numbers(context, "--context", int), parse_numbers(rows, "--rows", int)
    for option, values in (("--context", contexts), ("--rows", counts)):
        if min(values) < 1:
            raise ConfigError(f"{option} {min(values)}: at least 1 is needed")
        if max(values) > _MOST_POSITIONS:
            raise ConfigError(f"{option} {max(values)}: at most {_MOST_POSITIONS}")
    if fill not in ("text", "random"):
        raise ConfigError(f"unknown --fill '{fill}': {nearest(fill, ('text', 'random'))}")
    settings = _parse_plans(plans, sets or [])
    check_outputs({"--out": out})

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.engine.compose import plan_of
    from foretoken.methods.sparse.plan import SparseVerification
    from foretoken.native import build
    from foretoken_lab.timing.forward_cost import AttentionShapes
    from foretoken_lab.timing.verification import Prefix, measure

    quiet_transformers(verbose)
    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    with ExitStack() as stack:
        target = _load(model, max(contexts) + max(counts), stack, **loading.of_a_checkpoint)
        makers: dict[str, Any] = {label: plan_of(dict(each), target) for label, each in settings.items()}
        prefix = Prefix(target, _text(target, max(contexts) + max(counts)), random=fill == "random")
        with progress_bar("forwards", len(contexts) * len(counts) * repeats) as progress:
            timings = measure(prefix, makers, contexts=contexts, rows=counts, repeats=repeats, progress=progress)
        shapes = AttentionShapes(target)

    results = []
    for timing in timings:
        maker = makers[timing.plan]
        sparse = maker.blocks if isinstance(maker, SparseVerification) else None
        cost = shapes.cost(timing.context, timing.rows, sparse)
        results.append(
            {
                **timing.facts(),
                "flops": cost.flops,
                "bytes": cost.bytes,
                "attention_flops": cost.attention_flops,
                "read": cost.read,
                "settings": settings[timing.plan],
            }
        )
    facts = provenance(
        arguments.find_root().obj or sys.argv[1:],
        model=model,
        parameters=target.num_parameters,
        dtype=target.precision,
        device=str(target.device),
        threads=torch.get_num_threads(),
        fused=target.native_decoder is not None,
        decoder=build.origin() if target.native_decoder is not None else None,
        fill=fill,
        repeats=repeats,
    )
    record = {"provenance": facts, "results": results}
    if json:
        emit_json(record)
    else:
        _print_tables(results, facts)
    if out is not None:
        write_json(out, record)


def _parse_plans(text: str, sets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label -> settings, as in a recipe; none for the dense plan."""
    shared = parse_settings(sets)
    plans: dict[str, dict[str, Any]] = {}
    for piece in (piece.strip() for piece in text.split(",")):
        name, *own = split_settings(piece)
        if name not in _PLANS:
            raise ConfigError(f"--plans: unknown plan '{name}': {nearest(name, _PLANS)}")
        if piece in plans:
            raise ConfigError(f"--plans names {piece} twice: keep one")
        settings = parse_settings(own, f"--plans {name}+")
        for key in (*settings, *shared):
            if not key.startswith(_KEY):
                raise ConfigError(
                    f"'{key}' is not a setting of a plan: write {_KEY}{key}, for example {_KEY}budget=0.2"
                )
            if key in (f"{_KEY}confirm", f"{_KEY}refresh"):
                raise ConfigError(f"'{key}' says what happens between forwards, and one alone is timed: leave it out")
        if name == "dense":
            if settings:
                raise ConfigError(f"--plans {piece}: the dense plan has no settings")
            plans[piece] = {}
            continue
        if name == "prefix_tree" and not settings:
            plans[piece] = {"plan": name}
            continue
        plans[piece] = {**shared, **settings}
        if name == "prefix_tree":
            plans[piece]["plan"] = name
        if not any(f"{_KEY}{part}" in plans[piece] for part in ("attention", "ffn", "moe")):
            plans[piece][f"{_KEY}attention"] = "per_head"
        if f"{_KEY}attention" in plans[piece]:
            plans[piece].setdefault(f"{_KEY}dense_below", 0)
            plans[piece].setdefault(f"{_KEY}gate", False)
    return plans


def _load(model: str, positions: int, stack: ExitStack, *, dtype: str, **options: Any) -> LanguageModel:
    """The target; a random one is written to a folder that lives as long as the stack."""
    from foretoken.models.load import load

    if not model.startswith(SHAPE):
        check_model_name(model)
        return load(model, dtype=dtype, **options)
    name = model.removeprefix(SHAPE)
    known = (*SHAPES, *FAMILY_SHAPES)
    if name not in known:
        raise ConfigError(f"--model: unknown shape '{name}': {nearest(name, known)}")
    if dtype == "float16":
        raise ConfigError(f"--model {model} is made in bfloat16 or float32, not in float16")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foretoken-shape-")))
    made = "float32" if dtype == "float32" else "bfloat16"
    write_random_model(name, folder, made, positions=max(4096, positions))
    target = load(str(folder), dtype=dtype, **options)
    target.name = model
    return target


def _text(target: LanguageModel, count: int) -> list[int]:
    """So many tokens of the bundled prompts, repeated."""
    ids = list(target.tokenizer("\n\n".join(prompt.text for prompt in read_prompts(BUNDLED_SUITE)))["input_ids"])
    return (ids * -(-count // len(ids)))[:count]


def _print_tables(results: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    from rich.text import Text

    from foretoken.bench.table import terminal_table
    from foretoken_lab.timing.verification import sheets

    title = f"{facts['model']} {facts['dtype']}, {facts['threads']} threads, {facts['cpu']}"
    if facts["decoder"] is not None:
        title += f", native decoder {facts['decoder']}"
    parts: list[Any] = [Text(title, style="bold")]
    for sheet in sheets(results):
        parts += ["", terminal_table(sheet), Text(sheet.meaning, style="dim")]
    emit_laid_out(*parts)
