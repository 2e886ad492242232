"""What a second replica on a second core brings: Ray Serve with one thread for each replica.

    python benchmarks/replicas.py --model grown:base:100m --clients 8 --rounds 3 --json replicas.json

Three settings take turns, each with a cluster of its own: one replica where everything (replica, Ray, clients) has to
live on one core; one replica that leaves the other core to Ray and the clients; two replicas on the two cores, of which
Ray and the clients take part. There are as many clients for each replica. Answers come in one piece
and as streams, greedily, up to as many tokens, without prefix reuse.

The aim is two replicas over twice one core. What two processes can reach on this machine at all is measured next to it:
the library alone on one core, and on both cores at once, one process each, without server, Ray or clients. They share
caches and memory's bandwidth as the replicas do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from foretoken import LLM, SamplingParams
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken_lab.measurement import Measurement
from foretoken_lab.timing.serving import Endpoint, load

SETTINGS = {"one core": (1, 1), "one replica": (1, 2), "two replicas": (2, 2)}  # replicas, cores


def start(options: argparse.Namespace, replicas: int) -> tuple[subprocess.Popen[str], str]:
    """A cluster that answers, and its address."""
    given = {"--method": options.method, "--threads": 1, "--max-num-seqs": options.clients, "--replicas": replicas}
    flags = [str(each) for pair in given.items() for each in pair]
    command = [sys.executable, "-m", "foretoken", "serve", options.model, "--ray", *flags, "--port", "0"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen([*command, "--no-prefix-caching"], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("serving "):  # Ray says where it is ready, too
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, line.split(" at ")[1].split(" ")[0]
    raise SystemExit(f"the cluster did not come up:\n{said}")


def whole(endpoint: Endpoint, prompts: list[str], clients: int, tokens: int) -> tuple[int, float]:
    """All prompts in one piece each, by so many clients at a time: tokens and seconds."""

    def answer(prompt: str) -> int:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": endpoint.model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        url = f"{endpoint.url}/v1/chat/completions"
        asked = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urlopen(asked, timeout=600) as response:
            return int(json.loads(response.read())["usage"]["completion_tokens"])

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        count = sum(pool.map(answer, prompts))
    return count, time.perf_counter() - began


def streamed(endpoint: Endpoint, prompts: list[str], clients: int, tokens: int) -> tuple[int, float]:
    """The same as streams."""
    answers, seconds = load(endpoint, prompts, clients, tokens)
    failed = next((each.error for each in answers if each.error is not None), None)
    if failed is not None:
        raise SystemExit(f"a stream failed: {failed}")
    return sum(each.tokens for each in answers), seconds


def measure(options: argparse.Namespace, prompts: list[str], replicas: int, cores: int) -> dict[str, float]:
    """Requests and tokens per second of one setting, in one piece and as streams."""
    every = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, every[:cores])  # children have the same
    try:
        process, address = start(options, replicas)
        try:
            endpoint = Endpoint(label="ray", url=address, model=options.model)
            clients = replicas * options.clients
            streamed(endpoint, prompts[:clients], clients, 8)
            found = dict[str, float]()
            for name, ask in (("whole", whole), ("streamed", streamed)):
                tokens, seconds = ask(endpoint, prompts, clients, options.max_tokens)
                found[f"{name}_requests"], found[f"{name}_tokens"] = len(prompts) / seconds, tokens / seconds
            return found
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
    finally:
        os.sched_setaffinity(0, every)


def library(options: argparse.Namespace, prompts: list[str], core: int, line: Any) -> None:
    """A process on one core: says when it is ready, and for every word from the other end how long all prompts took."""
    os.sched_setaffinity(0, [core])
    config = {"method": options.method}
    llm = LLM(options.model, speculative_config=config, threads=1, max_num_seqs=options.clients)
    talks = [[{"role": "user", "content": each}] for each in prompts]
    llm.chat(talks[:2], SamplingParams(max_tokens=8))
    line.send(None)
    while line.recv():
        began = time.perf_counter()
        outputs = llm.chat(talks, SamplingParams(max_tokens=options.max_tokens))
        line.send((sum(len(each.token_ids) for each in outputs), time.perf_counter() - began))


def libraries(options: argparse.Namespace, prompts: list[str]) -> dict[str, list[float]]:
    """Tokens per second of one library process, and of two at once, each on a core of its own, in turns."""
    spawn = multiprocessing.get_context("spawn")
    lines = []
    for core in sorted(os.sched_getaffinity(0))[:2]:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=library, args=(options, prompts, core, theirs), daemon=True).start()
        lines.append(ours)
    for line in lines:
        line.recv()

    def run(asked: list[Any]) -> float:
        for line in asked:
            line.send(True)
        return sum(tokens / seconds for tokens, seconds in [line.recv() for line in asked])

    rounds = [(run(lines[:1]), run(lines)) for _ in range(options.rounds)]
    for line in lines:
        line.send(False)
    return {"one process": [one for one, _ in rounds], "two processes": [two for _, two in rounds]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="grown:base:100m")
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--clients", type=int, default=8, help="of each replica")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    measurement = Measurement("replicas.py", options.json, threads=None)
    prompts = [each.text for each in limit_per_category(read_prompts(BUNDLED_SUITE), options.limit)]
    alone = libraries(options, prompts)
    ceiling = sorted(two / 2 / one for one, two in zip(*alone.values(), strict=True))
    print(
        f"library: one process {median(alone['one process']):.0f} tokens/s, two {median(alone['two processes']):.0f}; "
        f"two over twice one: {median(ceiling):.3f} ({ceiling[0]:.3f}-{ceiling[-1]:.3f})",
        flush=True,
    )
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        rounds.append({name: measure(options, prompts, *setting) for name, setting in SETTINGS.items()})
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", flush=True)
    results: dict[str, Any] = {"rounds": rounds, "library": alone, "library, two over twice one": ceiling}
    for kind in ("whole", "streamed"):
        for name in SETTINGS:
            requests, tokens = (
                median(each[name][f"{kind}_{what}"] for each in rounds) for what in ("requests", "tokens")
            )
            print(f"{kind}, {name}: {requests:.2f} requests/s, {tokens:.0f} tokens/s")
        for base in ("one core", "one replica"):
            ratios = sorted(
                each["two replicas"][f"{kind}_tokens"] / 2 / each[base][f"{kind}_tokens"] for each in rounds
            )
            results[f"{kind}, over twice {base}"] = ratios
            print(f"{kind}: two replicas over twice {base}: {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})")
    measurement.write({"results": results}, model=options.model, prompts=len(prompts))


if __name__ == "__main__":
    main()
