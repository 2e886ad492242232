"""``foretoken train features``: what a target computes over text, on disk, for heads and adapters to train from."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretoken.cli.shared.console import display, emit_json, note, quiet_transformers
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import Verbose, data_option, json_option, out_option
from foretoken.core.errors import ConfigError, nearest
from foretoken.core.files import check_folder, check_readable
from foretoken.options.model import ModelOptions

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.models.load import Checkpoint
    from foretoken.train.mixture import Source
    from foretoken_lab.features.extract import Progress

DTYPES = ("bfloat16", "float16", "float32")
GIGABYTE = 10**9


@with_flags
def features(
    *,
    target: Annotated[
        str, typer.Option("--target", "-t", metavar="MODEL", help="A Hugging Face folder, a hub id, or zoo:NAME.")
    ],
    out: Annotated[Path, out_option("Folder to make; give it again to go on after a stop.")],
    data: Annotated[Path | None, data_option()] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus",
            metavar="FILE",
            help="FILE or FILE=SHARE: your own text, or 'generated': the lab's tasks. Repeatable.",
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            "--depths",
            metavar="N,…",
            help="Hidden states after so many layers: 0 to L, -1 the last; final: after the norm.",
        ),
    ] = "final",
    top_logits: Annotated[
        str,
        typer.Option(
            "--top-logits", help="How many logits to keep of every token, the largest, with the log-sum of all; or all."
        ),
    ] = "0",
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Stop after so many tokens; default: what --max-gb holds.")
    ] = None,
    max_gb: Annotated[
        float, typer.Option("--max-gb", help="Never write more than this (10^9 bytes, tokenised text aside).")
    ] = 2.0,
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens of a sequence.")] = 512,
    dtype: Annotated[
        str, typer.Option("--state-dtype", help="To store hidden states in: bfloat16, float16 or float32.")
    ] = "bfloat16",
    seed: Annotated[int, typer.Option("--seed", help="Of the order of the text.")] = 0,
    loading: Annotated[ModelOptions, Flags("Model", ("device", "threads"), defaults={"device": "cpu"})],
    as_json: Annotated[bool, json_option("What the folder holds as one JSON object on stdout.")] = False,
    verbose: Verbose = False,
) -> None:
    """Run a target over text and keep its hidden states and logits.

    Text comes from files of yours: JSON Lines with messages, prompt + response, or text; or plain text. Without
    --corpus it is the zoo's training mixture, which foretoken-lab has. After a stop the same command goes on after the
    last complete shard; more --tokens or --max-gb extend the folder. docs/features.md describes its files.

    [bold]Example[/bold]

      foretoken train features --target zoo:base --corpus my.jsonl --out my-features
    """
    depths = _depths(layers)
    kept = _top_logits(top_logits)
    if not depths and kept == 0:
        raise ConfigError("nothing to keep: name --depths, --top-logits, or both")
    if dtype not in DTYPES:
        raise ConfigError(f"--state-dtype {dtype}: {nearest(dtype, DTYPES)}")
    if not max_gb > 0:
        raise ConfigError(f"--max-gb {max_gb}: must be more than 0")
    chosen = _sources(corpus, data)
    check_folder(out, "--out")

    import torch

    from foretoken.models.load import load_as_is
    from foretoken_lab.features.extract import extract, longest
    from foretoken_lab.features.taps import Wanted

    quiet_transformers(verbose)
    wanted = Wanted(depths, kept, dtype)
    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    loaded = load_as_is(target, device=loading.device)
    most = longest(loaded.model)
    if most is not None and block > most:
        raise ConfigError(f"--block {block}: the target takes at most {most} tokens")
    with _progress(tokens) as report:
        summary = extract(
            loaded.model,
            _blocks(chosen, loaded, out / "tokens", block, seed, tokens),
            out,
            wanted,
            target=loaded.fingerprint,
            data=_description(chosen, loaded, block, seed),
            max_bytes=int(max_gb * GIGABYTE),
            report=report,
        )
    if as_json:
        emit_json({"folder": str(out), **asdict(summary)})
    rate = summary.new / max(summary.seconds, 1e-9)
    note(
        f"{out}: {summary.tokens:,} tokens in {summary.shards} shard{'s' * (summary.shards != 1)}, "
        f"{_size(summary.bytes)}; {summary.new:,} tokens are new ({rate:,.0f} tokens/s)"
    )
    if summary.full:
        note(f"stopped because --max-gb {max_gb:g} is reached; the same command with more of it goes on")


def _depths(layers: str) -> tuple[int | Literal["final"], ...]:
    """``4,final`` as depths; an empty text is none."""
    found: list[int | Literal["final"]] = []
    for each in filter(None, (part.strip() for part in layers.split(","))):
        if each == "final":
            found.append("final")
            continue
        try:
            found.append(int(each))
        except ValueError:
            raise ConfigError(
                f"--depths {layers}: '{each}' is no depth: give whole numbers and 'final', with commas between, "
                "as in 4,final"
            ) from None
    return tuple(found)


def _top_logits(value: str) -> int | Literal["all"]:
    if value == "all":
        return "all"
    if not value.isdecimal():
        raise ConfigError(f"--top-logits {value}: give a number of logits, or 'all'")
    return int(value)


def _sources(corpus: list[str] | None, data: Path | None) -> list[Source]:
    """Where the text comes from, known to be there before a model is loaded for it."""
    from foretoken.data.folder import check_one_text
    from foretoken.train import sources

    if not corpus:
        return sources.chosen(data, corpus, sources.mixture("base"))
    check_one_text(data, corpus)
    own = [sources.parse(entry) for entry in corpus]
    for path in (path for source in own for path in source.files):
        check_readable(path, "--corpus")
    names = [source.name for source in own]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--corpus: two files are called '{min(twice)}'; rename one, or join them")
    return own


def _blocks(
    chosen: list[Source], target: Checkpoint, folder: Path, block: int, seed: int, tokens: int | None
) -> Iterator[Tensor]:
    """The mixture, block by block; its token files are written when the first block is read."""
    from foretoken.train.mixture import Mixture
    from foretoken.train.rendering import encoder

    vocabulary = max(len(target.tokenizer), target.model.config.get_text_config(decoder=True).vocab_size)
    mixture = Mixture(chosen, encoder(target.tokenizer), folder, block, vocabulary, seed)
    for _ in itertools.count() if tokens is None else range(math.ceil(tokens / block)):
        yield mixture.next(1)


def _description(chosen: list[Source], target: Checkpoint, block: int, seed: int) -> dict[str, Any]:
    """How the text is made, for the index."""
    vocabulary = json.dumps(target.tokenizer.get_vocab(), sort_keys=True).encode()
    return {
        "block": block,
        "seed": seed,
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
        "sources": [
            {
                "name": source.name,
                "share": source.share,
                "files": [[path.name, path.stat().st_size] for path in source.files],
            }
            for source in chosen
        ],
    }


Report = Callable[["Progress"], None]


@contextmanager
def _progress(wanted: int | None) -> Iterator[Report]:
    """Show how far the extraction is, after one line that says how much it will take."""
    with display("features") as show:
        show("reading the text")
        announced = False

        def report(progress: Progress) -> None:
            nonlocal announced
            if not announced:
                announced = True
                note(_estimate(progress, wanted))
            end = _end(progress, wanted)
            show(_state(progress, end), None if not end else min(1.0, progress.tokens / end))

        yield report


def _estimate(progress: Progress, wanted: int | None) -> str:
    each = f"{progress.token_bytes:,} bytes a token"
    start = f"; {progress.tokens:,} tokens are there already" if progress.tokens else ""
    if wanted is not None and (progress.fits is None or wanted <= progress.fits):
        return f"{each}: {wanted:,} tokens take {_size(wanted * progress.token_bytes)}{start}"
    of = "" if wanted is None else f" of {wanted:,}"
    return f"{each}: the limit allows about {progress.fits:,} tokens{of}{start}"


def _size(count: int) -> str:
    return f"{count / GIGABYTE:.2f} GB" if count >= GIGABYTE else f"{count / 10**6:.1f} MB"


def _end(progress: Progress, wanted: int | None) -> int | None:
    """Tokens at which the run will stop, about."""
    return min((bound for bound in (wanted, progress.fits) if bound is not None), default=None)


def _state(progress: Progress, end: int | None) -> str:
    rate = progress.new / max(progress.seconds, 1e-9)
    done = "" if not end else f"{min(1.0, progress.tokens / end):.0%}, "
    return f"{done}{progress.tokens:,} tokens, {rate:,.0f} tokens/s"
