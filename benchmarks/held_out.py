"""The short held-out suite of the self-speculation measurements: 17 prompts of six kinds that no training saw.

    python benchmarks/held_out.py --data DATA --out held_out.jsonl

First turns of at most 400 characters from the evaluation sets under DATA/eval; the first eight such prompts of each set
are passed over, because they were looked at while the methods were tuned. Writes JSON Lines for ``--suite``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from foretoken.core.files import write_whole
from foretoken.data.readers import read_records

SETS = (("mt_bench", 3), ("gsm8k_test", 3), ("svamp", 3), ("spec_bench", 3), ("humaneval", 2), ("mbpp_test", 3))
LONGEST = 400  # characters
PASSED_OVER = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with eval/")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = [json.dumps(prompt) for name, count in SETS for prompt in _prompts(options.data / "eval", name, count)]
    write_whole(options.out, "\n".join(lines) + "\n")


def _prompts(folder: Path, name: str, count: int) -> Iterator[dict[str, Any]]:
    records = read_records(folder / f"{name}.jsonl.gz", ("id", "category", "turns"))
    fitting = (
        record
        for record in records
        if len(record["turns"][0]) <= LONGEST and (name != "spec_bench" or record["category"] == "qa")
    )
    for record in islice(fitting, PASSED_OVER, PASSED_OVER + count):
        yield {"id": record["id"], "category": "qa" if name == "spec_bench" else name, "turns": record["turns"][:1]}


if __name__ == "__main__":
    main()
