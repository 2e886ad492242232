"""What the server costs next to the library: the same prompts, so many at a time, in turns.

    python benchmarks/serving.py --model grown:base:100m --clients 1,8 --json serving.json

The server is a process of its own (``foretoken serve``); clients and library run here. While one works the others
rest. The library runs twice: all prompts at once with as many slots as there are clients, the most that a server
could reach; and by as many threads, each with one prompt after another, as clients ask a server: the place of one that
has ended is then empty until its successor joins at the next step. All answer greedily, up to as many tokens, without
prefix reuse.

Next to tokens per second it counts the processor seconds of the server, of the clients and of the library for the same
prompts: they separate the server's own time where clients or other programs use the same cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from statistics import median
from typing import Any

import psutil

from foretoken import LLM, SamplingParams
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken_lab.measurement import Measurement
from foretoken_lab.timing.serving import Endpoint, ask, load


def library(llm: LLM, prompts: list[str], tokens: int) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": each}] for each in prompts], SamplingParams(max_tokens=tokens))
    return sum(len(each.token_ids) for each in outputs) / (time.perf_counter() - began)


def by_threads(llm: LLM, prompts: list[str], clients: int, tokens: int) -> float:
    """Tokens per second where so many threads ask for one answer after another."""
    waiting, counts = iter(prompts), list[int]()
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                return
            (output,) = llm.chat([{"role": "user", "content": prompt}], SamplingParams(max_tokens=tokens))
            counts.append(len(output.token_ids))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def spent(process: psutil.Process) -> float:
    """Processor seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


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
    measurement = Measurement("serving.py", options.json, threads=None)
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
            theirs, ours = psutil.Process(server.pid), psutil.Process()
            rounds = []
            for _ in range(options.repeats):
                before = spent(theirs), spent(ours)
                answers, seconds = load(endpoint, prompts, clients, options.max_tokens)
                between = spent(theirs), spent(ours)
                alone = library(llm, prompts, options.max_tokens)
                after = spent(ours)
                threads = by_threads(llm, prompts, clients, options.max_tokens)
                served = sum(each.tokens for each in answers) / seconds
                served_cores, library_cores = between[0] - before[0], after - between[1]
                rounds.append(
                    {
                        "server": served,
                        "library": alone,
                        "threads": threads,
                        "ratio": served / alone,
                        "ratio_to_threads": served / threads,
                        "first_token": median(each.first for each in answers),
                        "server_cores": served_cores,
                        "client_cores": between[1] - before[1],
                        "library_cores": library_cores,
                        "more_cores": served_cores / library_cores - 1,
                    }
                )
        finally:
            server.terminate()
            server.wait()
        ratios = sorted(each["ratio"] for each in rounds)
        results.append(
            {"clients": clients, "rounds": rounds, "ratio": median(ratios), "range": [ratios[0], ratios[-1]]}
        )
        figures = {name: median(each[name] for each in rounds) for name in rounds[0]}
        print(
            f"{clients} clients: server {figures['server']:.0f}, library {figures['library']:.0f}, "
            f"its threads {figures['threads']:.0f} tokens/s; server over library {median(ratios):.3f} "
            f"({ratios[0]:.3f}-{ratios[-1]:.3f}), over threads {figures['ratio_to_threads']:.3f}; "
            f"first token {1000 * figures['first_token']:.0f} ms; "
            f"processor seconds: server {figures['server_cores']:.2f}, library {figures['library_cores']:.2f} "
            f"({100 * figures['more_cores']:+.1f} %), clients {figures['client_cores']:.2f}"
        )
    measurement.write({"results": results}, model=options.model, prompts=len(prompts), threads=options.threads)


if __name__ == "__main__":
    main()
