"""Our engine, transformers, llama.cpp and OpenVINO on the same weights and the same prompts, in one run.

    python -m foretoken_lab.peers.peers --limit 2 --repeats 1
    python -m foretoken_lab.peers.peers --suite spec_bench.jsonl.gz --limit 10 --json peers.json
    python -m foretoken_lab.peers.peers --model zoo:smollm2-135m --draft none
    python -m foretoken_lab.peers.peers --model grown:base:100m --dtype int8 --minutes 4 \\
        --engines none,draft_model,llama.cpp*

Greedy (``--temperature`` samples), one prompt at a time, until the model ends its turn. For every prompt and repeat all
engines run one after the other, and the order rotates, so that a slow minute of the machine slows all of them alike.
The prompt is the same token ids for all (chat template applied once); tokens are counted from the ids that come back,
by the same code. Where a peer has settings, several are measured and its best one counts, which favours the peer.
``--dtype int8`` and ``int4`` are ours, Q8_0 and Q4_0 of llama.cpp and OpenVINO, bfloat16 of transformers; drafts are
bfloat16 in all of them. A model that is a GGUF file is read by all engines from that file; transformers computes its
weights in bfloat16.

After each round of all engines a line says how fast each was so far. ``--minutes`` ends a run after a whole round; the
order of the prompts is shuffled, so that every category has been measured by then. Files of llama.cpp are made once and
kept in the user's cache folder.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console

from foretoken import LLM
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.core.files import check_writable, write_whole
from foretoken.core.provenance import provenance
from foretoken.data.prompts import BUNDLED_SUITE, Prompt, limit_per_category, read_prompts
from foretoken_lab.peers import adapters, comparison
from foretoken_lab.peers.comparison import BASELINE, Call
from foretoken_lab.peers.openvino import openvino_family
from foretoken_lab.peers.versions import Quiet, command, versions

_WARM_UP_PROMPTS = 2
WHOLE, TIME_UP, INTERRUPTED = "whole", "time up", "interrupted"  # how a measurement ended


def main() -> int:
    began = time.perf_counter()
    options = _options()
    torch.set_num_threads(options.threads)
    if options.json:
        check_writable(options.json, "--json")
    prompts = limit_per_category(read_prompts(options.suite), options.limit)
    draft = None if options.draft in ("", "none") else options.draft
    file = adapters.gguf_file_of(options.model)
    if file is not None and options.dtype is not None:
        raise ConfigError(f"--dtype {options.dtype}: '{options.model}' is a GGUF file, which has its own; leave it out")
    options.dtype = adapters.FILE if file is not None else options.dtype or "bfloat16"
    given = {} if file is not None else {"dtype": options.dtype}
    target = LLM(options.model, threads=options.threads, max_num_seqs=1, speculative_config=None, **given)
    ids_of = [_prompt_ids(target, prompt) for prompt in prompts]
    context = max(map(len, ids_of)) + options.max_tokens + 64  # a draft may follow the last token
    engines = _engines(options, target, draft, context)
    if not engines:
        raise ConfigError(f"--engines {options.engines}: no engine of that name")
    quiet = Quiet()
    minutes = math.inf if options.minutes is None else options.minutes - (time.perf_counter() - began) / 60
    calls, ended = measure(engines, prompts, ids_of, options.max_tokens, options.repeats, minutes)
    others = quiet.report()
    names = [engine.name for engine in engines]
    results = comparison.summarise(calls, names)
    groups = {engine.name: engine.group for engine in engines}
    for result in results:
        result["group"] = groups[result["engine"]]
    headlines = _headlines(results, calls)
    if options.temperature > 0:  # drawn texts differ in any case
        for result in results:
            result["equality"] = None
    # weights that each engine has rounded in its own way are other models: their differences are not of rounding sums
    rounded = options.dtype in (*adapters.QUANTISED, adapters.FILE)
    margins = {} if rounded or options.temperature > 0 else _margins(options, calls, ids_of)
    title = (
        f"{options.model}, {options.dtype}, temperature {options.temperature:g}, {options.threads} threads, "
        f"{len(prompts)} prompts x {options.repeats}"
    )
    Console(width=None if sys.stdout.isatty() else 160).print(comparison.tables(results, headlines, title))
    for name, margin in margins.items():
        print(f"{name}: first differences from '{comparison.REFERENCE}' have float32 logit margins of "
              f"{margin['median']:.3g} (median), {margin['range'][1]:.3g} (largest)")  # fmt: skip
    if options.json:
        facts = provenance(
            [],
            model=options.model,
            draft=draft,
            dtype=options.dtype,
            threads=options.threads,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            repeats=options.repeats,
            limit=options.limit,
            complete=ended == WHOLE,
            suite="bundled" if Path(options.suite) == BUNDLED_SUITE else Path(options.suite).name,
            num_prompts=len(prompts),
            llama_flash_attention=options.llama_flash,
        )
        facts["command"] = command("-m foretoken_lab.peers.peers")
        facts["share_of_processors_used_by_others"] = others
        facts["versions"] |= versions()
        document = {
            "provenance": facts,
            "headlines": headlines,
            "margins_at_first_difference": margins,
            "results": results,
            "calls": [_record(call, prompts) for call in calls],
        }
        write_whole(Path(options.json), json.dumps(document, indent=1) + "\n")
    return int(any(result["failures"] for result in results) or ended == INTERRUPTED)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="zoo:base", help="zoo:NAME, a GGUF file, or a folder of the Llama layout")
    parser.add_argument("--draft", default="zoo:draft", help="draft model for all engines, or 'none'")
    parser.add_argument("--suite", default=str(BUNDLED_SUITE), help="prompts as JSON Lines, .gz too")
    parser.add_argument("--limit", type=int, help="prompts of every category at most")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy; above: all engines sample")
    dtypes = ["bfloat16", "float16", "float32", *adapters.QUANTISED]
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16, of a GGUF file its own")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--engines", default="*", help="by name, commas, * allowed: none,suffix,llama.cpp*")
    parser.add_argument("--minutes", type=float, help="of the whole run, loading included")
    parser.add_argument(
        "--llama-flash",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="llama.cpp with its flash attention, which was the faster setting where this was tried",
    )
    parser.add_argument("--json", help="write everything here")
    return parser.parse_args()


def _prompt_ids(llm: LLM, prompt: Prompt) -> list[int]:
    if llm.is_chat_model:
        return llm.chat_prompt([{"role": "user", "content": prompt.text}])["prompt_token_ids"]
    return list(llm.tokenizer(prompt.text)["input_ids"])


def _engines(options: argparse.Namespace, target: LLM, draft: str | None, context: int) -> list[Any]:
    """Every requested engine; no other engine is loaded."""
    wanted = [pattern.strip() for pattern in options.engines.split(",")]

    def requested(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)

    recipes = adapters.our_recipes(draft)
    engines: list[Any] = [
        adapters.Foretoken(name, target.with_method(recipe), options.temperature)
        for name, recipe in recipes.items()
        if requested(name)
    ]
    if any("transformers".startswith(pattern.split("*")[0][:12]) for pattern in wanted):
        model = adapters.load_transformers(options.model, adapters.dense(options.dtype))
        assistant = adapters.load_transformers(draft, adapters.dense(options.dtype)) if draft else None
        family = adapters.transformers_family(model, assistant, options.temperature)
        engines += [each for each in family if requested(each.name)]
    if any("llama.cpp".startswith(pattern.split("*")[0][:9]) for pattern in wanted):
        llama_cpp = adapters.import_llama_cpp()
        if llama_cpp is not None:
            engines += adapters.llama_cpp_family(
                llama_cpp,
                adapters.kept_gguf(options.model, options.dtype),
                adapters.kept_gguf(draft, adapters.dense(options.dtype)) if draft else None,
                context=context,
                threads=options.threads,
                end_ids=target.target.end_ids,
                flash=options.llama_flash,
                temperature=options.temperature,
                requested=requested,
            )
    if any("openvino".startswith(pattern.split("*")[0][:8]) for pattern in wanted):
        # it does not open bfloat16 files
        dtype = "float16" if options.dtype == "bfloat16" else options.dtype
        engines += openvino_family(
            adapters.kept_gguf(options.model, dtype),
            threads=options.threads,
            end_ids=target.target.end_ids,
            temperature=options.temperature,
            requested=requested,
        )
    return engines


def measure(
    engines: Sequence[adapters.Adapter],
    prompts: Sequence[Prompt],
    ids_of: Sequence[list[int]],
    max_tokens: int,
    repeats: int,
    minutes: float,
) -> tuple[list[Call], str]:
    """All calls, and how the run ended: after Ctrl-C, or when the time is up, those of whole rounds are kept."""
    began = time.perf_counter()
    for engine in engines:
        for ids in ids_of[:_WARM_UP_PROMPTS]:
            _call(engine, ids, min(max_tokens, 32))
    calls: list[Call] = []
    count = len(engines)
    total = repeats * len(prompts)
    # a fixed shuffle: when a run is cut short, every category has been measured
    order = list(range(len(prompts)))
    random.Random(0).shuffle(order)
    gc.collect()
    gc.freeze()  # loaded models are not garbage: a collection in the middle of a call should not walk them
    try:
        for repeat in range(repeats):
            for number, index in enumerate(order):
                turn = (repeat * 7 + number) % count
                round_calls = []
                for engine in [*engines[turn:], *engines[:turn]]:
                    tokens, seconds, steps, error = _call(engine, ids_of[index], max_tokens)
                    first = 0.0
                    if error is None and len(tokens) > 1:
                        _, first, _, error = _call(engine, ids_of[index], 1)
                    category = prompts[index].category
                    round_calls.append(
                        Call(engine.name, index, category, repeat, seconds, first, tuple(tokens), steps, error)
                    )
                calls += round_calls
                done, taken = repeat * len(prompts) + number + 1, (time.perf_counter() - began) / 60
                print(
                    f"{done}/{total} rounds, {taken:.1f} min: {comparison.so_far(calls)}", file=sys.stderr, flush=True
                )
                if taken > minutes and done < total:
                    print("the time is up: reporting whole rounds", file=sys.stderr)
                    return calls, TIME_UP
    except KeyboardInterrupt:
        print("\ninterrupted: reporting whole rounds", file=sys.stderr)
        return calls, INTERRUPTED
    return calls, WHOLE


def _call(engine: adapters.Adapter, ids: list[int], max_tokens: int) -> tuple[list[int], float, int, str | None]:
    began = time.perf_counter()
    try:
        tokens = engine.generate(ids, max_tokens)
    except Exception as error:  # one engine failing must not cost the others their measurements
        return [], 0.0, 0, f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    metrics = getattr(engine, "metrics", None)
    if not 0 < len(tokens) <= max_tokens:
        return [], 0.0, 0, f"returned {len(tokens)} tokens where 1 to {max_tokens} were requested"
    return tokens, seconds, metrics.num_steps if metrics else 0, None


def _headlines(results: list[dict[str, Any]], calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The comparisons that matter, each between named engines: fastest against fastest."""

    def names(start: str) -> list[str]:
        return [result["engine"] for result in results if result["engine"].startswith(start)]

    ours = comparison.best(results, [r["engine"] for r in results if r["group"] == "ours"])
    plain = "none"
    assisted = comparison.best(results, names("transformers assisted"))
    lookup = comparison.best(results, names("transformers lookup"))
    wanted = [
        ("our best against transformers plain", ours, BASELINE),
        ("our plain against transformers plain", plain, BASELINE),
        ("our best against transformers assisted, its best", ours, assisted),
        ("our best against transformers lookup, its best", ours, lookup),
        ("our plain against llama.cpp plain", plain, "llama.cpp"),
        ("our best against llama.cpp plain", ours, "llama.cpp"),
        ("our best against llama.cpp, its best of all", ours, comparison.best(results, names("llama.cpp"))),
        ("our best against OpenVINO, its best of all", ours, comparison.best(results, names("openvino"))),
    ]
    found = []
    for what, a, b in wanted:
        mine = [call for call in calls if call.engine == a and call.error is None]
        theirs = [call for call in calls if call.engine == b]
        figures = comparison.ratio(mine, theirs)
        if figures is not None:
            found.append({"what": what, "engine": a, "against": b, **figures})
    return found


def _margins(options: argparse.Namespace, calls: Sequence[Call], ids_of: Sequence[list[int]]) -> dict[str, Any]:
    """For each engine: how far apart float32 logits see the two tokens at its first differences from our plain output.

    A small margin is rounding; a large one would be a bug of one of the engines.
    """
    reference = {call.prompt: call.tokens for call in reversed(calls) if call.engine == "none" and call.error is None}
    wanted: dict[str, set[tuple[int, int, int, int]]] = {}
    for call in calls:
        if call.error is None and call.prompt in reference:
            ours = reference[call.prompt]
            place = comparison.first_difference(call.tokens, ours)
            if place is not None and place < min(len(call.tokens), len(ours)):
                key = (call.prompt, place, call.tokens[place], ours[place])
                wanted.setdefault(call.engine, set()).add(key)
    if not wanted:
        return {}
    model = adapters.load_transformers(options.model, "float32")
    known: dict[tuple[int, int, int, int], float] = {}
    for key in {each for keys in wanted.values() for each in keys}:
        prompt, place, theirs, expected = key
        ids = [*ids_of[prompt], *reference[prompt][:place]]
        with torch.inference_mode():
            logits_V = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        known[key] = abs(float(logits_V[theirs] - logits_V[expected]))
    return {name: comparison.spread(known[key] for key in keys) for name, keys in wanted.items()}


def _record(call: Call, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "engine": call.engine,
        "prompt": prompts[call.prompt].id,
        "repeat": call.repeat,
        "seconds": round(call.seconds, 6),
        "first_token_seconds": round(call.first, 6),
        "num_tokens": len(call.tokens),
        "num_steps": call.steps,
        "error": call.error,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForetokenError as error:
        print(f"peers: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
