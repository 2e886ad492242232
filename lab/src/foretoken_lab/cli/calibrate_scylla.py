"""``foretoken calibrate scylla``: how many nodes to draft by the number of requests, measured on this machine."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.suite import read_suite
from foretoken.cli.shared.console import emit_json, note, progress_bar, quiet_transformers
from foretoken.cli.shared.flags import with_flags
from foretoken.cli.shared.options import (
    Loading,
    Model,
    Verbose,
    check_model_name,
    json_option,
    limit_option,
    out_option,
    repeats_option,
    suite_option,
)
from foretoken.cli.shared.settings import parse_numbers
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.files import check_writable, write_whole
from foretoken.data.prompts import limit_per_category

_MOST_BATCH, _MOST_NODES = 256, 256


@with_flags
def scylla(
    *,
    context: typer.Context,
    model: Model,
    head: Annotated[
        Path | None,
        typer.Option(
            "--head",
            metavar="DIR",
            help="The head, of foretoken train scylla.",
            show_default="scylla next to the model's weights",
        ),
    ] = None,
    out: Annotated[Path | None, out_option("File to write.", show_default="widths.json next to the head")] = None,
    batches: Annotated[str, typer.Option("--batch-size", metavar="N,…", help="Prompts that run together.")] = "1,2,4,8",
    nodes: Annotated[str, typer.Option("--nodes", metavar="N,…", help="Nodes of a draft.")] = "1,2,4,8,16,32",
    max_depth: Annotated[int, typer.Option("--max-depth", min=1, help="Longest path of a draft.")] = 6,
    width: Annotated[int, typer.Option("--width", min=1, help="Of a tree: nodes expanded at a level.")] = 8,
    chain: Annotated[bool, typer.Option("--chain", help="Chains instead of trees.")] = False,
    suite: Annotated[str | None, suite_option()] = None,
    limit: Annotated[int | None, limit_option(None, "Prompts per category at most, not in all.")] = 2,
    tokens: Annotated[int, typer.Option("--max-tokens", min=8, help="Tokens of an answer at most.")] = 48,
    repeats: Annotated[int, repeats_option("Timed runs of each setting.")] = 3,
    loading: Loading,
    as_json: Annotated[bool, json_option("Print the measurements as one JSON object on stdout.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure the best size of Scylla's tree for every number of requests, on this machine.

    The model answers the prompts once, and the head is replayed along the
    answers: this counts the tokens of a step of each size. Steps of each batch
    and size are timed in turn with plain steps, and the size of the most tokens
    per second is written down, never a larger one for a larger batch. 0: plain
    decoding is faster.

    [bold]Example[/bold]

      foretoken calibrate scylla --model zoo:base --head my-head

      foretoken generate "Once" --model zoo:base --method scylla --set head=my-head
    """
    check_model_name(model)
    sizes = _increasing(batches, "--batch-size", _MOST_BATCH)
    widths = _increasing(nodes, "--nodes", _MOST_NODES)
    from foretoken.methods.scylla.width import FILE, FORMAT, KIND

    head = _found(model) if head is None else head
    if out is None and not head.is_dir():
        raise InputError(f"--head {head}: there is no such folder")
    place = check_writable(out or head / FILE, "--out")
    prompts = limit_per_category(read_suite(suite), limit)

    import torch

    from foretoken.core.provenance import provenance
    from foretoken.engine.llm import LLM
    from foretoken.methods.scylla.drafter import ScyllaDrafter
    from foretoken.models.fingerprint import fingerprint_of
    from foretoken_lab.calibrations.scylla import measure

    quiet_transformers(verbose)
    settings = ScyllaDrafter.Config(head=str(head), tree=not chain, max_depth=max_depth, width=width)
    llm = LLM(model, speculative_config={"method": "none"}, **asdict(loading))
    try:
        read = [_ids(llm, prompt.text) for prompt in prompts]
        fitting = [ids for ids in read if len(ids) + tokens <= llm.target.max_length]
        if not fitting:
            raise InputError(f"with an answer of {tokens} tokens no prompt fits the context; lower --max-tokens")
        with progress_bar("steps of the measurement", 2 + len(widths)) as advance:
            found = measure(
                llm, settings, fitting, batches=sizes, nodes=widths, tokens=tokens, repeats=repeats, progress=advance
            )
    finally:
        llm.close()
    record = {
        "format": FORMAT,
        "algorithm": KIND,
        "unit": "verified nodes per sequence",
        "target": llm.target.name,
        "target_fingerprint": fingerprint_of(llm.target.source),
        "tree": not chain,
        "max_depth": max_depth,
        "width": width,
        **found,
        "provenance": provenance(
            context.find_root().obj or [],
            dtype=llm.target.precision,
            device=str(llm.target.device),
            threads=torch.get_num_threads(),
            prompts=len(fitting),
            tokens=tokens,
            repeats=repeats,
        ),
    }
    write_whole(place, jsonlib.dumps(record, indent=1) + "\n")
    if as_json:
        emit_json(record)
    for line in _in_words(record):
        note(line)
    note(f"wrote {place}")


def _found(model: str) -> Path:
    """The head next to a model's weights.

    Raises:
        InputError: there is none.
    """
    from foretoken.methods.scylla.network import Scylla
    from foretoken.models.fingerprint import folder_of
    from foretoken.models.load import source_of

    place = folder_of(source_of(model)) / Scylla.algorithm
    if not Scylla.lies_in(place):
        how = Scylla.how(model, "").replace("--out DIR", f"--out {place}")
        raise InputError(f"no {Scylla.title} in {place}: make one with '{how}', or name one with --head DIR")
    return place


def _increasing(text: str, option: str, most: int) -> list[int]:
    found = parse_numbers(text, option, int)
    if any(not 1 <= each <= most for each in found):
        raise ConfigError(f"{option} {text}: numbers from 1 to {most}")
    return sorted(set(found))


def _ids(llm: Any, text: str) -> list[int]:
    if llm.is_chat_model:
        ids: list[int] = llm.chat_prompt([{"role": "user", "content": text}])["prompt_token_ids"]
        return ids
    return list(llm.tokenizer(text)["input_ids"])


def _in_words(record: dict[str, Any]) -> list[str]:
    gains = ", ".join(f"{nodes}: {gain:.2f}" for nodes, gain in record["accepted"].items())
    lines = [f"tokens per step by nodes, along {record['recorded_tokens']} recorded tokens: {gains}"]
    roof = dict(map(tuple, record["roofline"]["k_roof"]))
    for batch, chosen in record["widths"]:
        rates = {each["nodes"]: each["tokens_per_second"] for each in record["measured"] if each["batch"] == batch}
        shown = ", ".join(f"{nodes}: {rate:.0f}" for nodes, rate in sorted(rates.items()))
        lines.append(f"{batch} requests: {chosen} nodes (tokens per second by nodes {shown}; k_roof {roof[batch]})")
    return lines
