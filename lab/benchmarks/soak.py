"""A server under requests of all kinds, while clients give up and the server is killed: losses, leaks, wrong texts.

    python lab/benchmarks/soak.py --model zoo:smollm2-135m --minutes 60 --restart-minutes 10 --json soak.json

``foretoken serve`` runs in a process of its own, with two adapters of random weights. Every answer is compared with
the library's, which decodes without drafts, each question alone: texts, log-probabilities and numbers of tokens; of a
structured answer the form is checked, too. Sampled answers are compared if the method promises the same stream. A share
of the clients gives up after a random part of the time that such questions take.

Every ``--restart-minutes`` the server is killed (SIGKILL) while it answers, and started again; the questions that it
had not answered are sent again. With ``--prefix-cache-dir`` it writes prefixes there, also what a killed one left: on a
file system of a few megabytes (``mount -t tmpfs -o size=64m tmpfs DIR``) the disk is full most of the time.
``--prefix-cache-dir`` is emptied before every second start.

Afterwards nothing may run or wait, every slot must be there, the counters of ``/metrics`` must agree with the requests
since the last start, and the memory of no server may have grown in the second half of its time. Ends with 1 where
anything of that is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from foretoken import LLM, SamplingParams
from foretoken.cli.shared.settings import RecipeFlags
from foretoken.data.prompts import BUNDLED_SUITE, read_prompts
from foretoken.engine.output import Completion
from foretoken.lora.request import LoRARequest
from foretoken_lab.measurement import Measurement

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATTERN = "(yes|no), [0-9]{1,3}"
# long enough to be kept on disk
SYSTEM = "You are a careful assistant. " + " ".join(
    f"Rule {number}: answer question {number} of a user in at most {number + 3} sentences." for number in range(1, 9)
)
ADAPTERS = ("one", "two")
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["count", "sure"],
    "additionalProperties": False,
}
TOOL = {"name": "pick", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
MISTAKES: tuple[tuple[str, Any, int], ...] = (
    (CHAT, {"messages": []}, 400),
    (CHAT, b"{", 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": "warm"}, 400),
    (TEXT, {"prompt": "x", "structured_outputs": {"json": {}, "regex": "x"}}, 400),
    (TEXT, {"prompt": "x" * 200_000}, 400),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "gpt-4"}, 404),
    ("/v1/embeddings", {"input": "x"}, 404),
)


@dataclass(frozen=True)
class Question:
    """A request and how its answer is known.

    Attributes:
        kind: for the table.
        path, body: of the request.
        expected: every completion, or the status of a refused request; none: only the form is known.
        form: what must hold of every text, too.
        before: text that every completion begins with.
    """

    kind: str
    path: str
    body: Any
    expected: list[Completion] | int
    form: Callable[[str], bool] = lambda text: True
    before: str = ""


@dataclass
class Life:
    """What happened between a start of the server and its end."""

    completions: int = 0
    tokens: int = 0
    given_up: int = 0
    memory: list[int] = field(default_factory=list)  # bytes, once a minute


@dataclass
class Tally:
    """The outcomes of the requests."""

    ended: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    sent_again: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    # that an answer of a kind takes, the last ones weighing most
    seconds: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server:
    """``foretoken serve`` in a process that may be killed and started again.

    Args:
        arguments: of the command.
        port: which it listens on.
        folder: of its prefixes; None: they stay in memory.
    """

    def __init__(self, arguments: list[str], port: int, folder: Path | None) -> None:
        self._arguments, self._port, self._folder = arguments, port, folder
        self._answers = threading.Event()
        self.lives: list[Life] = []
        self.start()

    def start(self) -> None:
        if self._folder is not None and len(self.lives) % 2:
            for path in self._folder.iterdir():
                path.unlink()
        self._process = subprocess.Popen([sys.executable, "-m", "foretoken", "serve", *self._arguments])
        if not until(self._is_up, 300.0):
            raise RuntimeError("the server does not answer")
        self.lives.append(Life())
        self._answers.set()

    def restart(self) -> None:
        self._answers.clear()
        self._process.kill()
        self._process.wait()
        self.start()

    def stop(self) -> int:
        """Its exit status."""
        self._process.terminate()
        return self._process.wait(timeout=120)

    def life(self) -> Life:
        """The present one; waits while the server starts."""
        self._answers.wait()
        return self.lives[-1]

    def is_in(self, life: Life) -> bool:
        return self._answers.is_set() and self.lives[-1] is life

    def weigh(self) -> None:
        self.lives[-1].memory.append(psutil.Process(self._process.pid).memory_info().rss)

    def _is_up(self) -> bool:
        try:
            return bool(metrics(self._port))
        except (OSError, HTTPException):
            return False


def write_adapter(folder: Path, llm: LLM, *, seed: int) -> None:
    """A LoRA folder with random corrections of the output projections of two layers."""
    folder.mkdir()
    draws, width = torch.Generator().manual_seed(seed), llm.target.width
    key = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"
    weights = {
        key.format(layer, side): torch.randn(shape, generator=draws) / 8
        for layer in (1, 2)
        for side, shape in (("A", (4, width)), ("B", (width, 4)))
    }
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')


def questions(
    llm: LLM, name: str, prompts: list[str], adapters: dict[str, Path], rng: random.Random, *, same_stream: bool
) -> list[Question]:
    """One of every kind for every prompt, with what the library answers.

    Args:
        adapters: folders by the name that selects them.
        same_stream: whether what the server draws with a seed is what the library draws.
    """
    found: list[Question] = []

    def add(kind: str, path: str, fields: dict[str, Any], wanted: list[Completion], **more: Any) -> None:
        body = {"model": name, "temperature": 0, **fields}
        found.append(Question(kind, path, body, wanted, **more))
        options = {"stream_options": {"include_usage": True}} if path != RESPONSES else {}
        found.append(Question(f"{kind}, streamed", path, {**body, "stream": True, **options}, wanted, **more))

    for prompt in prompts:
        said = {"messages": [{"role": "user", "content": prompt}]}
        count, seed = rng.randrange(1, 40), rng.randrange(2**40)
        greedy = SamplingParams(max_tokens=count, logprobs=3)
        talk = [said["messages"]]
        ruled = [{"role": "system", "content": SYSTEM}, *said["messages"]]

        def chat(params: SamplingParams, talk: Any = talk) -> list[Completion]:
            return llm.chat(talk, params)[0].outputs

        def text(params: SamplingParams, prompt: str = prompt) -> list[Completion]:
            return llm.generate([prompt], params)[0].outputs

        add("chat after rules", CHAT, {"messages": ruled, "max_tokens": count}, chat(greedy, [ruled]))
        for number, (adapter, folder) in enumerate(adapters.items(), 1):
            request = LoRARequest(adapter, number, str(folder))
            wanted = llm.chat([ruled], greedy, lora_request=request)[0].outputs
            add("adapter", CHAT, {"model": adapter, "messages": ruled, "max_tokens": count}, wanted)
        salted = {"cache_salt": rng.choice(["a", "b"])}
        add("chat", CHAT, {**said, "max_tokens": count}, chat(greedy))
        add("chat, salted", CHAT, {**said, **salted, "max_completion_tokens": count}, chat(greedy))
        add("text", TEXT, {"prompt": prompt, "max_tokens": count}, text(greedy))
        add("response", RESPONSES, {"input": prompt, "max_output_tokens": count}, chat(greedy))
        add("plain", CHAT, {**said, "max_tokens": count, "speculation": {"enabled": False}}, chat(greedy))
        drawn: dict[str, Any] = {"temperature": 0.9, "seed": seed, "n": 2, "top_p": 0.9}
        params = SamplingParams(max_tokens=count, **drawn)
        wanted = chat(params) if same_stream else []
        add("two, drawn with a seed", CHAT, {**said, **drawn, "max_tokens": count}, wanted)
        add("log-probabilities", CHAT, {**said, "max_tokens": count, "logprobs": True, "top_logprobs": 3}, chat(greedy))
        scored = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": count}
        add("echo", TEXT, scored, text(greedy), before=prompt)
        stopped = SamplingParams(max_tokens=count, stop=["e", "and"], logprobs=2)
        add("stop", TEXT, {"prompt": prompt, "stop": ["e", "and"], "max_tokens": count, "logprobs": 2}, text(stopped))
        another = prompts[rng.randrange(len(prompts))]
        both = [*text(SamplingParams(max_tokens=9)), *text(SamplingParams(max_tokens=9), another)]
        add("two prompts", TEXT, {"prompt": [prompt, another], "max_tokens": 9}, both)
        form = SamplingParams(max_tokens=40, structured_outputs={"regex": PATTERN}, n=2, temperature=1.5, seed=seed)
        drawn = {"structured_outputs": {"regex": PATTERN}, "n": 2, "temperature": 1.5, "seed": seed}
        add(
            "two of a pattern", CHAT, {**said, **drawn, "max_tokens": 40}, chat(form) if same_stream else [],
            form=lambda answer: re.fullmatch(PATTERN, answer) is not None,
        )  # fmt: skip
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        filled = SamplingParams(max_tokens=64, structured_outputs={"json": SCHEMA})
        add("schema", CHAT, {**said, "max_tokens": 64, "response_format": schema}, chat(filled))
        tools = {"tools": [{"type": "function", "function": TOOL}], "max_tokens": 60}
        add(
            "tools", CHAT, {**said, **tools, "tool_choice": "required", "parallel_tool_calls": False}, [], form=_is_call
        )
        chosen = {"tool_choice": {"type": "function", "function": {"name": TOOL["name"]}}}
        add("a tool", CHAT, {**said, **tools, **chosen, "temperature": 1, "n": 2}, [], form=_is_call)
    for path, body, status in MISTAKES:
        whole = {"model": name, **body} if isinstance(body, dict) else body
        found.append(Question("mistake", path, whole, status))
    return found


def _is_call(text: str) -> bool:
    name, _, arguments = text.partition(" ")
    return name == TOOL["name"] and json.loads(arguments) in ({"a": 1}, {"a": 2})


@dataclass
class Said:
    """What an answer has: texts and log-probabilities of its completions, calls as name and arguments; tokens."""

    texts: list[str]
    logprobs: list[list[float]]
    tokens: int


def read(question: Question, raw: bytes) -> Said:
    """An answer, in one piece or as events."""
    stream = question.body.get("stream")
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")] if stream else []
    if question.path == RESPONSES:
        whole = events[-1]["response"] if stream else json.loads(raw)
        said = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
        text = whole["output"][0]["content"][0]["text"]
        assert said == text or not stream, "the deltas are another text than the whole"
        return Said([text], [[]], whole["usage"]["output_tokens"])
    if not stream:
        events = [json.loads(raw)]
    else:
        assert raw.rstrip().endswith(b"data: [DONE]"), "the stream breaks off"
    texts: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    ends = Counter[int]()
    for each in events:
        assert "error" not in each, each
        for choice in each["choices"]:
            index = choice["index"]
            said = _text(choice, choice.get("message") or choice.get("delta") or choice)
            texts[index] = texts.get(index, "") + said
            logprobs[index] = logprobs.get(index, []) + _values(choice.get("logprobs") or {})
            ends[index] += choice["finish_reason"] is not None
    assert set(ends.values()) == {1}, f"a completion does not end once: {ends}"
    tokens = events[-1]["usage"]["completion_tokens"]
    return Said([texts[each] for each in sorted(texts)], [logprobs[each] for each in sorted(texts)], tokens)


def _values(logprobs: dict[str, Any]) -> list[float]:
    if "content" in logprobs:
        return [each["logprob"] for each in logprobs["content"]]
    values: list[float] = logprobs.get("token_logprobs", [])
    return values


def compare(question: Question, said: Said) -> str | None:
    """The differences from the library's answers."""
    assert not isinstance(question.expected, int)
    if not all(map(question.form, said.texts)):
        return f"{said.texts} is not of the form"
    if not question.expected:
        return None
    texts = [question.before + each.text for each in question.expected]
    if said.texts != texts:
        return f"{said.texts} for {texts}"
    tokens = sum(len(each.token_ids) for each in question.expected)
    if said.tokens != tokens:
        return f"{said.tokens} tokens for {tokens}"
    for values, wanted in zip(said.logprobs, question.expected, strict=True):
        known = [each.logprob for each in wanted.logprobs or ()]
        answered = values[len(values) - len(known) :] if question.before else values  # the prompt's come first
        if values and (
            len(answered) != len(known) or any(abs(a - b) > 1e-4 for a, b in zip(answered, known, strict=True))
        ):
            return f"log-probabilities {answered} for {known}"
    asks = question.body.get("logprobs") is not None
    return "log-probabilities are missing" if asks and not all(said.logprobs) else None


def _text(choice: dict[str, Any], said: dict[str, Any]) -> str:
    calls = [each["function"] for each in said.get("tool_calls") or ()]
    pieces = [f"{each['name']} {each['arguments']}" if each.get("name") else each["arguments"] for each in calls]
    return "".join(pieces) or said.get("content") or choice.get("text") or ""


def ask(question: Question, port: int, patience: float | None) -> tuple[int, bytes] | None:
    """Status and body; None: it was given up."""
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    raw = question.body if isinstance(question.body, bytes) else json.dumps(question.body)
    deadline = None if patience is None else time.monotonic() + patience
    pieces: list[bytes] = []
    try:
        connection.request("POST", question.path, raw, {"content-type": "application/json"})
        _wait(connection, deadline)
        response = connection.getresponse()
        while not pieces or pieces[-1]:
            _wait(connection, deadline)
            pieces.append(response.read1(65536))
        return response.status, b"".join(pieces)
    except TimeoutError:
        if deadline is None:
            raise
        return None
    finally:
        connection.close()


def _wait(connection: HTTPConnection, deadline: float | None) -> None:
    if deadline is not None and connection.sock is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.sock.settimeout(left)


def check(question: Question, answer: tuple[int, bytes], tally: Tally, life: Life) -> None:
    """Count an answer and its faults."""
    status, raw = answer
    fault = None
    tokens = completions = 0
    if isinstance(question.expected, int):
        told = json.loads(raw).get("error", {})
        if status != question.expected or set(told) != {"message", "type", "param", "code"}:
            fault = f"{status} for {question.expected}: {raw[:200]!r}"
    elif status != 200:
        fault = f"{status}: {raw[:200]!r}"
    else:
        try:
            said = read(question, raw)
            tokens, completions = said.tokens, len(said.texts)
            fault = compare(question, said)
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            fault = f"{type(error).__name__} {error}: {raw[-300:]!r}"
    with tally.lock:
        tally.ended[question.kind] += 1
        life.tokens += tokens
        life.completions += completions
        if fault is not None:
            tally.faults.append(f"{question.kind}: {fault}")


def metrics(port: int) -> dict[str, float]:
    """The server's numbers, summed over labels but for the reasons of ends."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    found: dict[str, float] = {}
    for line in lines:
        if match := re.fullmatch(r"(?:vllm|foretoken):(\w+)\{(.*)\} (\S+)", line):
            reason = re.search(r'finished_reason="(\w+)"', match[2])
            name = f"{match[1]} {reason[1]}" if reason else match[1]
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def slots_in_use(port: int, model: str, count: int) -> int:
    """How many requests run at once when as many as there are slots ask without an end."""
    body = {"model": model, "prompt": "x", "ignore_eos": True, "max_tokens": 900, "stream": True}
    open_ones = []
    for _ in range(count):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", TEXT, json.dumps(body), {"content-type": "application/json"})
        open_ones.append(connection)
    until(lambda: metrics(port)["num_requests_running"] == count, 10.0)
    found = int(metrics(port)["num_requests_running"])
    for connection in open_ones:
        connection.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:draft")
    parser.add_argument("--dtype", default="auto", help="of the server and of the library")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--prompts", type=int, default=8, help="each is used in every kind")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--cancelled", type=float, default=0.2, help="share of the requests that are given up")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more requests are sent")
    parser.add_argument("--restart-minutes", type=float, default=float("inf"), help="between kills of the server")
    parser.add_argument("--prefix-cache-dir", type=Path, help="an empty folder, or what a former run left in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8398)
    parser.add_argument("--json")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    measurement = Measurement("soak.py", options.json, threads=None)
    with TemporaryDirectory() as made:
        result = measure(options, rng, Path(made))
    for fault in result["faults"][:20]:
        print(fault)
    print(json.dumps({key: value for key, value in result.items() if key != "faults"}, indent=1))
    print(f"{len(result['faults'])} faults")
    measurement.write({"results": result}, model=options.model)
    sys.exit(bool(result["faults"]))


def measure(options: argparse.Namespace, rng: random.Random, place: Path) -> dict[str, Any]:
    """Ask the library, then the server.

    Args:
        place: an empty folder for the adapters.
    """
    load = partial(LLM, options.model, dtype=options.dtype, threads=1)
    llm = load(speculative_config=None)
    adapters = {name: place / name for name in ADAPTERS}
    for seed, folder in enumerate(adapters.values()):
        write_adapter(folder, llm, seed=seed)
    prompts = rng.sample([each.text for each in read_prompts(BUNDLED_SUITE)], options.prompts)
    drawn = load(speculative_config=RecipeFlags(method=options.method).config(options.model))
    promise = drawn.recipe.promise_for(SamplingParams(temperature=0.9, seed=1))
    drawn.close()
    pool = questions(llm, options.model, prompts, adapters, rng, same_stream=promise == "same stream")
    llm.close()
    arguments = [options.model, "--method", options.method, "--dtype", options.dtype, "--threads", "1"]
    arguments += ["--port", str(options.port), "--max-num-seqs", str(options.max_num_seqs)]
    for name, folder in adapters.items():
        arguments += ["--lora", f"{name}={folder}"]
    if options.prefix_cache_dir is not None:
        arguments += ["--prefix-cache-dir", str(options.prefix_cache_dir)]
    server = Server(arguments, options.port, options.prefix_cache_dir)
    try:
        result = soak(server, pool, options, rng)
    finally:
        code = server.stop()
    if code != 0:
        result["faults"].append(f"the server has ended with {code}")
    return result


def soak(server: Server, pool: list[Question], options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Send requests and kill the server, check its state at the end, and report faults."""
    port, tally = options.port, Tally()
    began = time.monotonic()
    end = began + 60 * options.minutes

    def client() -> None:
        while time.monotonic() < end:
            with tally.lock:
                question = rng.choice(pool)
                part = rng.random() if rng.random() < options.cancelled else None
                patience = None if part is None else part * tally.seconds.get(question.kind, 0.1)
            while not answered(question, patience):
                with tally.lock:
                    tally.sent_again[question.kind] += 1

    def answered(question: Question, patience: float | None) -> bool:
        """Whether the server lived long enough."""
        life = server.life()
        asked_at = time.monotonic()
        try:
            answer = ask(question, port, patience)
        except (OSError, HTTPException) as error:
            if not server.is_in(life):
                return False
            with tally.lock:
                tally.faults.append(f"{question.kind}: {type(error).__name__} {error}")
            return True
        took = time.monotonic() - asked_at
        if answer is not None and not server.is_in(life):
            return False  # its end may be missing
        with tally.lock:
            if answer is None:
                tally.given_up[question.kind] += 1
                life.given_up += 1
            elif patience is None:
                usual = tally.seconds.setdefault(question.kind, took)
                tally.seconds[question.kind] = usual + (took - usual) / 8
        if answer is not None:
            check(question, answer, tally, life)
        return True

    threads = [threading.Thread(target=client, daemon=True) for _ in range(options.clients)]
    for thread in threads:
        thread.start()
    weighed, started = 0.0, began
    while time.monotonic() < end:
        time.sleep(1.0)
        now = time.monotonic()
        if now > weighed + 60:
            server.weigh()
            weighed = now
        if now > started + 60 * options.restart_minutes:
            server.restart()
            started = time.monotonic()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    server.weigh()
    faults, life = tally.faults, server.life()
    if not until(lambda: metrics(port)["num_requests_running"] + metrics(port)["num_requests_waiting"] == 0):
        faults.append(f"something runs or waits: {metrics(port)}")
    counted = metrics(port)
    ends = {key.split(" ")[1]: int(value) for key, value in counted.items() if key.startswith("request_success_total")}
    whole = ends.get("stop", 0) + ends.get("length", 0)
    most = life.completions + 2 * life.given_up  # two completions are the most that one asks for
    if not life.completions <= whole <= sum(ends.values()) <= most or ends.get("error"):
        faults.append(f"{ends} requests have ended for {life.completions} answers and {life.given_up} given up")
    if counted["generation_tokens_total"] < life.tokens:
        faults.append(f"{counted['generation_tokens_total']} tokens were counted for {life.tokens} in the answers")
    found = slots_in_use(port, options.model, options.max_num_seqs)
    if found != options.max_num_seqs:
        faults.append(f"{found} of {options.max_num_seqs} slots are there")
    if not until(lambda: metrics(port)["num_requests_running"] == 0):
        faults.append("requests of closed connections go on")
    for each in server.lives:
        later = each.memory[len(each.memory) // 2 :]
        if len(later) > 3 and max(later) > 1.05 * later[0]:
            faults.append(f"memory grows: {each.memory}")
    folder = options.prefix_cache_dir
    return {
        "answered": sum(tally.ended.values()),
        "given_up": sum(tally.given_up.values()),
        "sent_again": sum(tally.sent_again.values()),
        "kills": len(server.lives) - 1,
        "kinds": dict(sorted(tally.ended.items())),
        "completions": sum(each.completions for each in server.lives),
        "tokens": sum(each.tokens for each in server.lives),
        "ended_since_last_start": ends,
        "cached_tokens_since_last_start": int(counted["prefix_cache_hits_total"]),
        "prompt_tokens_since_last_start": int(counted["prompt_tokens_total"]),
        "prefix_files": None if folder is None else len(list(folder.glob("*.prefix"))),
        "memory_mb": [[round(count / 2**20) for count in each.memory] for each in server.lives],
        "seconds": round(took, 1),
        "faults": faults,
    }


if __name__ == "__main__":
    main()
