"""What the server costs beside the library: the same prompts, so many at a time, in turns.

    python benchmarks/serving.py --model grown:base:100m --clients 1,8 --json serving.json

The server is a process of its own (``foretoken serve``); clients and library run here. While one works the other
rests. The library gets all prompts at once with as many slots as there are clients: the most that a server could
reach; both answer greedily, up to as many tokens, without prefix reuse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from foretoken import LLM, SamplingParams
from foretoken.bench.serving import Endpoint, ask, load
from foretoken.bench.workloads import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken.core.provenance import provenance


def library(llm: LLM, prompts: list[str], tokens: int) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": each}] for each in prompts], SamplingParams(max_tokens=tokens))
    return sum(len(each.token_ids) for each in outputs) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="grown:base:100m")
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    prompts = [each.text for each in limit_per_category(read_prompts(BUNDLED_SUITE), options.limit)]
    results: list[dict[str, Any]] = []
    for clients in map(int, options.clients.split(",")):
        given = {"--method": options.method, "--threads": options.threads, "--max-num-seqs": clients, "--port": 8399}
        flags = [str(each) for pair in given.items() for each in pair]
        command = [sys.executable, "-m", "foretoken", "serve", options.model, *flags, "--no-prefix-caching"]
        server = subprocess.Popen(command)
        try:
            endpoint = Endpoint(label="server", url="http://127.0.0.1:8399", model=options.model)
            while ask(endpoint, "Hello", 2).error is not None:
                time.sleep(0.5)
            config = {"method": options.method}
            llm = LLM(options.model, speculative_config=config, threads=options.threads, max_num_seqs=clients)
            library(llm, prompts[:2], 8)
            rounds = []
            for _ in range(options.repeats):
                answers, seconds = load(endpoint, prompts, clients, options.max_tokens)
                served = sum(each.tokens for each in answers) / seconds
                firsts = sorted(each.first for each in answers)
                alone = library(llm, prompts, options.max_tokens)
                rounds.append(
                    {"server": served, "library": alone, "ratio": served / alone, "first_token": median(firsts)}
                )
        finally:
            server.terminate()
            server.wait()
        ratios = sorted(each["ratio"] for each in rounds)
        results.append(
            {"clients": clients, "rounds": rounds, "ratio": median(ratios), "range": [ratios[0], ratios[-1]]}
        )
        figures = {name: median(each[name] for each in rounds) for name in ("server", "library", "first_token")}
        print(
            f"{clients} clients: server {figures['server']:.0f}, library {figures['library']:.0f} tokens/s, "
            f"{median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}); "
            f"first token {1000 * figures['first_token']:.0f} ms"
        )
    if options.json:
        record = {"results": results, "provenance": provenance(sys.argv, model=options.model, prompts=len(prompts))}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
