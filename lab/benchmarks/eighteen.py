"""Every method of the eighteen papers against plain decoding and against copying, in one run a target.

    foretoken calibrate vocabulary --model zoo:base --corpus chats.jsonl --writer raw --size 2048 --out kept
    python lab/benchmarks/eighteen.py --kept kept --head scylla=DIR --head dovetail=DIR --json eighteen.json

A row is a setting of one paper's method: a target and drafter that this repository brings, prompts, and options of
``foretoken bench``, which measures all settings of a target in turns with plain decoding (``none``) and the cheapest
drafter (``ngram``). ``grown:base:100m`` writes the text of ``zoo:base`` at the cost of a model of 100 M parameters.
Kept rows (VocabTrim) and the heads of other methods are not bundled: options name them. ``docs/methods/README.md`` is
made from the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken_lab.measurement import Measurement

CHEAPEST = "ngram"
_FIGURES = ("speedup", "decode_speedup", "tokens_per_step", "distortion", "equal_outputs", "num_prompts", "num_tokens")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A target, its prompts, and the methods that are measured with them.

    Attributes:
        target: a model name of ``foretoken bench``.
        prompts: a description for readers.
        options: of ``foretoken bench``.
        methods: by card; what ``--methods`` takes.
    """

    target: str
    prompts: str
    options: tuple[str, ...]
    methods: dict[str, str]


_LONG = "verification.attention=per_head+verification.dense_below=0+verification.budget=0.2"
SETTINGS = (
    Setting(
        target="grown:base:100m",
        prompts="the bundled prompts, greedy",
        options=("--draft-model", "zoo:draft"),
        methods={
            "del": "del",
            "easyspec": "easyspec+model=zoo:base",
            "entropy_adaptive": "entropy_adaptive",
            "judge": "draft_model+verifier=judge",
            "kangaroo": "kangaroo",
            "pearl": "draft_model+executor=pearl",
            "rasd": "rasd",
            "reflective": "draft_model+verifier=reflective",
            "sprinter": "sprinter",
            "draft_model": "draft_model",
            "draft_model_20": "draft_model+num_speculative_tokens=20",
            "eagle": "eagle",
            "suffix": "suffix",
            "suffix_first": "suffix_first+model=zoo:draft",
        },
    ),
    Setting(target="zoo:base", prompts="the bundled prompts, greedy", options=(), methods={"diffuspec": "diffuspec"}),
    Setting(
        target="grown:base:100m",
        prompts="the bundled prompts, temperature 0.7",
        options=("--draft-model", "zoo:draft", "--temperature", "0.7"),
        methods={
            "block": "draft_model+verifier=block",
            "kseq": "draft_model+verifier=kseq+num_drafts=3",
            "spechub": "draft_model+verifier=spechub",
            "transport": "draft_model+verifier=transport+num_drafts=3",
        },
    ),
    Setting(
        target="zoo:hybrid",
        prompts="the bundled prompts, greedy, a tree of drafts",
        options=("--draft-model", "zoo:draft"),
        methods={"stree": "draft_model+tree=topk"},
    ),
    Setting(
        target="zoo:long",
        prompts="the bundled prompts after 4,000 tokens of others, greedy",
        options=("--prompt-tokens", "4000", "--limit", "2"),
        methods={
            "longspec": "longspec",
            "sparse_verification": f"suffix+{_LONG}",
            "sparse_votes": f"suffix+{_LONG}+verification.voters=all",
            "suffix": "suffix",
        },
    ),
)


def main() -> int:
    options = _options()
    measurement = Measurement("eighteen.py", options.json, threads=None)
    rows = [row for setting in (*SETTINGS, *_trained(options)) for row in _measured(setting, options)]
    for row in rows:
        print(
            f"{row['card']:20} {row['target']:16} {row['speedup']:.2f}x, {row['tokens_per_step']:.2f} tokens per step"
        )
    targets = list(dict.fromkeys(row["target"] for row in rows))
    measurement.write({"rows": rows}, targets=targets, repeats=options.repeats, threads=options.threads)
    return 0


def _trained(options: argparse.Namespace) -> list[Setting]:
    """What the options of the script add."""
    heads = dict(each.split("=", 1) for each in options.head)
    methods = {name: f"{name}+head={folder}" for name, folder in heads.items()}
    if options.kept:
        methods["vocabtrim"] = f"draft_model+model=zoo:draft+draft_vocab={options.kept}"
        methods["draft_model"] = "draft_model+model=zoo:draft"
    prompts = "the bundled prompts, greedy, with kept rows or heads"
    return [Setting(target=options.target, prompts=prompts, options=(), methods=methods)] if methods else []


def _measured(setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every method of a setting, and for the cheapest drafter."""
    methods = {CHEAPEST: CHEAPEST, **setting.methods}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "bench.json"
        command = [
            *(sys.executable, "-m", "foretoken", "bench", "--model", setting.target, *setting.options),
            *("--methods", ",".join(methods.values()), "--repeats", str(options.repeats)),
            *("--threads", str(options.threads), "--max-tokens", str(options.max_tokens), "--out", str(record)),
        ]
        if "--limit" not in command and options.limit:
            command += ["--limit", str(options.limit)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = {each["method"]: each for each in json.loads(record.read_text(encoding="utf-8"))["results"]}
    return [_row(setting, card, results[method]) for card, method in methods.items()]


def _row(setting: Setting, card: str, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "card": card,
        "target": setting.target,
        "prompts": setting.prompts,
        "method": result["method"],
        **{name: None if result[name] is None else round(result[name], 4) for name in _FIGURES},
        "spread": [round(each, 3) for each in result["spread"]["speedup"]],
        "by_category": {
            name: {figure: round(each[figure], 3) for figure in ("speedup", "tokens_per_step")}
            for name, each in result["by_category"].items()
        },
        "drafter_bytes": result["memory"]["drafter_bytes"],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="append", default=[], help="NAME=DIR: a method, and a head for --target")
    parser.add_argument("--kept", help="a folder of foretoken calibrate vocabulary for --target")
    parser.add_argument("--target", default="grown:base:100m", help="of --head and --kept")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, help="prompts of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
