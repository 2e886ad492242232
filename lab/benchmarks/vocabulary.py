"""What a trimmed draft head costs and gains, by the number of tokens that are kept.

    python benchmarks/vocabulary.py --data DATA --parts texts,tasks --json vocabulary.json
    python benchmarks/vocabulary.py --parts shapes --json vocabulary_shapes.json
    python benchmarks/vocabulary.py --data DATA --parts tasks --target zoo:smollm2-135m --draft zoo:smollm2-135m \
        --corpora gsm8k_train --counted raw --threads 1 --json vocabulary_smollm2.json
    python benchmarks/vocabulary.py --data DATA --parts tasks --target zoo:gemma3-270m --draft zoo:gemma3-270m \
        --corpora mbpp_train --counted raw --threads 1 --json vocabulary_gemma3.json

* texts: the most frequent tokens of the corpora themselves, of what the draft model and of what the target write to
  their prompts; coverage of all three sets on other texts of the target's.
* tasks: draft_model with the set that one kind of text gives, with and without context rows, and untrimmed; greedy,
  a fixed number of draft tokens, every prompt by all settings one after the other, in an order that rotates, and by
  plain decoding. With one corpus (--corpora) the tasks are of the same domain and of others. A model with a large
  vocabulary that drafts for itself shows what rows of the head cost and what missing ones lose. Accepted
  tokens per draft and task, milliseconds of drafting per draft token and tokens per second of decoding (the first token
  of a request comes with its prompt and is left out), and the memory-bound speed-up that the weights alone would give.
* shapes: a draft pass of one row after cached ones, of random weights: its acceptance would mean nothing. The head's
  share is what the pass takes longer than one without a head. With --threads 1 the time is the processor's, which
  others disturb less than the clock on the wall.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.core.files import check_writable, write_whole
from foretoken.core.provenance import provenance
from foretoken.data.documents import documents
from foretoken.data.folder import data_root
from foretoken.drafting.draft_vocabulary import CONTEXT_ROWS, DraftVocabulary
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken_lab.calibrations import vocabulary
from foretoken_lab.peers.versions import Quiet, command
from foretoken_lab.suites.self_speculation import held_out
from foretoken_lab.timing.memory_bound import memory_bound_speedup

CORPORA = ("gsm8k_train", "mbpp_train", "sgd_dialogues", "topical_chat")
FRACTIONS = (16, 8, 4, 2, 1)
CACHED = 128  # rows before a timed pass


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    quiet = Quiet()
    if options.json:
        check_writable(options.json, "--json")
    console = Console(width=None if sys.stdout.isatty() else 160)
    parts, found = options.parts.split(","), {}
    if "texts" in parts or "tasks" in parts:
        target, draft = load(options.target, dtype=options.dtype), load(options.draft, dtype=options.dtype)
        texts = _texts(target, draft, options)
        if "texts" in parts:
            found["texts"] = _coverages(texts, target)
            console.print(_coverage_table(found["texts"]))
        if "tasks" in parts:
            found["head"] = _passes(draft, _sizes(draft.vocab_size), options.passes)
            console.print(_pass_table(found["head"], options.draft))
            found["tasks"] = _tasks(texts[options.counted], target, draft, options)
            console.print(_task_table(found["tasks"]))
    for name in options.shapes.split(",") if "shapes" in parts else ():
        model = load(f"shape:{name}", dtype=options.dtype)
        found[name] = _passes(model, _sizes(model.vocab_size), options.passes)
        console.print(_pass_table(found[name], f"shape:{name}"))
    others = quiet.report()
    if options.json:
        facts = provenance(
            [], model=options.target, draft=options.draft, dtype=options.dtype, threads=options.threads, seed=0
        )
        facts["command"] = command("vocabulary.py")
        facts["share_of_processors_used_by_others"] = others
        write_whole(Path(options.json), json.dumps({"provenance": facts, **found}, indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the corpora")
    parser.add_argument("--corpora", default=",".join(CORPORA), help="counted, of the folder")
    parser.add_argument("--parts", default="texts,tasks,shapes")
    parser.add_argument("--target", default="zoo:base")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--shapes", default="draft32k,draft152k")
    parser.add_argument("--tokens", type=int, default=20_000, help="written by each model")
    parser.add_argument("--raw-tokens", type=int, default=200_000, help="of the corpora themselves")
    parser.add_argument("--counted", default="target", choices=["raw", "drafter", "target"], help="for the tasks")
    parser.add_argument("--texts", type=Path, help="keep what the models wrote here, and read it from there")
    parser.add_argument("--num-drafts", type=int, default=4, help="draft tokens per step")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--per-task", type=int, default=3, help="prompts of each task at most")
    parser.add_argument("--passes", type=int, default=40, help="timed draft passes of each size, interleaved")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write everything here")
    return parser.parse_args()


def _sizes(vocab_size: int) -> list[int]:
    return [vocab_size // fraction for fraction in FRACTIONS]


# ---------------------------------------------------------------------------------------------------- texts


def _texts(
    target: LanguageModel, draft: LanguageModel, options: argparse.Namespace
) -> dict[str, list[vocabulary.Written]]:
    """Texts of each kind, every fifth of which is not counted."""
    if options.texts is not None and options.texts.is_file():
        kept = json.loads(options.texts.read_text(encoding="utf-8"))
        return {kind: [vocabulary.Written(*each) for each in its] for kind, its in kept.items()}
    root = data_root(options.data)
    paths = [next((root / name).glob("train.jsonl.*")) for name in options.corpora.split(",")]

    def read() -> Any:
        return vocabulary.in_turn([documents(path) for path in paths])

    kinds = {"raw": vocabulary.raw(read(), target.tokenizer)}
    writers = {"drafter": draft, "target": target}
    for kind, model in writers.items() if "texts" in options.parts.split(",") or options.counted != "raw" else ():
        llm = LLM.from_target(model, seed=0)
        kinds[kind] = vocabulary.generated(read(), llm, length=96, temperature=0.0, seed=0)
    found = {}
    for kind, texts in kinds.items():
        found[kind], left = [], options.raw_tokens if kind == "raw" else options.tokens
        for text in texts:
            found[kind].append(text)
            left -= sum(text.counts)
            if left <= 0:
                break
    if options.texts is not None:
        kept = {kind: [[list(each.tokens), list(each.counts)] for each in its] for kind, its in found.items()}
        write_whole(options.texts, json.dumps(kept))
    return found


def _chosen(texts: list[vocabulary.Written], size: int, model: LanguageModel, context_rows: int) -> vocabulary.Chosen:
    return vocabulary.choose(
        texts, size, model.vocab_size, vocabulary.forced(model), tokens=1 << 40, context_rows=context_rows
    )


def _coverages(texts: dict[str, list[vocabulary.Written]], target: LanguageModel) -> list[dict[str, Any]]:
    """Each kind's choice on the target's texts that were not counted."""
    other = texts["target"][vocabulary.HELD_OUT - 1 :: vocabulary.HELD_OUT]
    rows = []
    for kind, its in texts.items():
        counted = [text for number, text in enumerate(its) if number % vocabulary.HELD_OUT != vocabulary.HELD_OUT - 1]
        for size in _sizes(target.vocab_size)[:-1]:
            # four counted ones before every one that is not
            group = vocabulary.HELD_OUT - 1
            starts = zip(range(0, len(counted), group), itertools.cycle(other), strict=False)
            mixed = [each for start, one in starts for each in (*counted[start : start + group], one)]
            found = _chosen(mixed, size, target, CONTEXT_ROWS)
            rows.append(
                {
                    "text": kind,
                    "kept": len(found.ids),
                    "tokens": found.num_tokens,
                    "coverage": found.coverage,
                    "with_context": found.with_context,
                }
            )
    return rows


# ---------------------------------------------------------------------------------------------------- tasks


def _tasks(
    texts: list[vocabulary.Written], target: LanguageModel, draft: LanguageModel, options: argparse.Namespace
) -> dict[str, Any]:
    every = defaultdict(list)
    for prompt in held_out(options.data):
        every[prompt.category].append(prompt)
    prompts = [prompt for its in every.values() for prompt in its[: options.per_task]]
    settings: dict[str, dict[str, Any]] = {"all": {"kept": target.vocab_size, "context_rows": 0, "folder": None}}
    with tempfile.TemporaryDirectory(prefix="foretoken-vocabulary-") as place:
        for size, rows in itertools.product(_sizes(target.vocab_size), (0, CONTEXT_ROWS)):
            if size == target.vocab_size and rows:
                continue  # nothing is left for them
            chosen, folder = _chosen(texts, size, target, rows), Path(place) / f"{size}-{rows}"
            DraftVocabulary(
                ids=chosen.ids,
                vocab_size=target.vocab_size,
                tokenizer=vocabulary_fingerprint(target.tokenizer),
                target=target.name,
                context_rows=rows,
            ).save(folder)
            settings[folder.name] = {"kept": len(chosen.ids), "context_rows": rows, "folder": str(folder)}
        engines = {name: _engine(target, options, each["folder"]) for name, each in settings.items()}
        engines["plain"] = LLM.from_target(target, speculative_config=None, seed=0, max_num_seqs=1)
        results = _interleaved(engines, prompts, options.max_tokens)
        plain_tokens_per_second = results.pop("plain")["tokens_per_second"]
    plain = {name: result.pop("texts") for name, result in results.items()}
    head = draft.config.hidden_size
    layers = draft.num_parameters - draft.vocab_size * head
    for name, each in settings.items():
        cost = (layers + each["kept"] * head) / target.num_parameters
        result = results[name]
        result |= {"kept": each["kept"], "context_rows": each["context_rows"], "same_text": plain[name] == plain["all"]}
        result["speedup"] = result["tokens_per_second"] / plain_tokens_per_second
        result["mbsu"] = memory_bound_speedup(result["tokens_per_step"], cost, options.num_drafts)
    return results


def _engine(target: LanguageModel, options: argparse.Namespace, folder: str | None) -> LLM:
    config = {
        "method": "draft_model",
        "model": options.draft,
        "num_speculative_tokens": options.num_drafts,
        "draft_vocab": folder,
    }
    return LLM.from_target(target, speculative_config=config, seed=0, max_num_seqs=1)


def _interleaved(engines: dict[str, LLM], prompts: list[Any], max_tokens: int) -> dict[str, dict[str, Any]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    names = list(engines)
    metrics: dict[str, dict[str, list[Any]]] = {name: defaultdict(list) for name in names}
    texts: dict[str, list[list[int]]] = {name: [] for name in names}
    for name in names:  # warm-up: compile and allocate
        engines[name].generate(["Once"], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    for number, prompt in enumerate(prompts):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            engine, message = engines[name], {"role": "user", "content": prompt.text}
            text = engine.chat_prompt([message]) if engine.tokenizer.chat_template else prompt.text
            [output] = engine.generate(text, params)
            metrics[name][prompt.category].append(output.metrics)
            texts[name].append(output.token_ids)
    results = {}
    for name in names:
        every = [each for its in metrics[name].values() for each in its]
        results[name] = {
            **_summed(every),
            "tasks": {task: _summed(its) for task, its in metrics[name].items()},
            "texts": texts[name],
        }
    return results


def _summed(every: list[Any]) -> dict[str, Any]:
    steps, drafted = sum(each.num_steps - 1 for each in every), sum(each.num_draft_tokens for each in every) or 1
    return {
        "tokens_per_step": sum(each.num_tokens - 1 for each in every) / steps,
        "accepted_per_draft": sum(each.num_accepted_tokens for each in every) / steps,
        "draft_ms_per_token": 1e3 * sum(each.draft_seconds for each in every) / drafted,
        "tokens_per_second": median(each.num_tokens / each.seconds for each in every),
    }


# ---------------------------------------------------------------------------------------------------- passes


def _passes(model: LanguageModel, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Milliseconds of a pass of one row, its best token ranked, by rows of the head; 0: no head."""
    generator = torch.Generator().manual_seed(0)
    heads: dict[int, HeadRows | None] = {0: None, model.vocab_size: None}
    for size in sizes[:-1]:
        heads[size] = HeadRows(
            model, torch.randperm(model.vocab_size, generator=generator)[:size].sort().values.tolist()
        )
    cache = model.new_cache(1)
    slot = cache.acquire()
    cache.reserve(slot, CACHED + 1)
    first = PackedBatch()
    first.add_chunk(slot, 0, [1] * CACHED, wanted=0)
    model.forward(first, DensePlan(cache, first))
    cache.commit(slot, range(CACHED))
    seconds: dict[int, list[float]] = {size: [] for size in heads}
    order = sorted(heads)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for number in range(repeats + 2):
        turn = number % len(order)
        for size in order[turn:] + order[:turn]:
            batch = PackedBatch()
            batch.add_chunk(slot, CACHED, [2], wanted=int(size > 0))
            began = clock()
            model.forward(batch, DensePlan(cache, batch), top=int(size > 0), head=heads[size])
            seconds[size].append(clock() - began)
    bare = 1e3 * median(seconds[0][2:])
    rows = []
    for size in order[1:]:
        whole = 1e3 * median(seconds[size][2:])
        rows.append({"rows": size, "ms": whole, "head_share": max(0.0, 1 - bare / whole)})
    return {"vocab_size": model.vocab_size, "parameters": model.num_parameters, "without_head_ms": bare, "passes": rows}


# ---------------------------------------------------------------------------------------------------- tables


def _coverage_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("counted text", "tokens kept", "coverage", "with context rows", title="of other words of the target")
    for row in rows:
        table.add_row(row["text"], f"{row['kept']:,}", f"{row['coverage']:.1%}", f"{row['with_context']:.1%}")
    return table


def _pass_table(found: dict[str, Any], name: str) -> Table:
    table = Table("rows of the head", "ms a pass", "head's share", "times", title=f"{name}: a draft pass of one row")
    whole = found["passes"][-1]["ms"]
    for row in found["passes"]:
        table.add_row(f"{row['rows']:,}", f"{row['ms']:.3f}", f"{row['head_share']:.0%}", f"{whole / row['ms']:.2f}x")
    return table


def _task_table(results: dict[str, Any]) -> Table:
    tasks = list(results["all"]["tasks"])
    table = Table(
        "tokens kept",
        "context rows",
        *tasks,
        "all",
        "ms/draft token",
        "tokens/s",
        "over plain",
        "MBSU",
        "same text",
        title="accepted tokens per draft",
    )
    for each in results.values():
        table.add_row(
            f"{each['kept']:,}",
            str(each["context_rows"]),
            *(f"{each['tasks'][task]['accepted_per_draft']:.2f}" for task in tasks),
            f"{each['accepted_per_draft']:.2f}",
            f"{each['draft_ms_per_token']:.3f}",
            f"{each['tokens_per_second']:.0f}",
            f"{each['speedup']:.2f}x",
            f"{each['mbsu']:.2f}",
            "yes" if each["same_text"] else "no",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
