"""A running server, from outside: is it reached, what does it run, and what slows it."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from foretoken.doctor.finding import Finding, found

_SECONDS = 10.0  # for each answer of the server
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(reason|outcome|source|finished_reason)="([^"]*)"')
_MOST_WAITING = 0.1  # of a request's time
_FULL = 0.9  # of the rows for keys and values
_MOST_READING = 0.5  # of the time of requests that have a place
_FEW_ACCEPTED = 0.25  # of draft tokens
_REMEDIES = {401: "--api-key KEY, or FORETOKEN_API_KEY", 503: "start it again: its log names the cause"}
# code of docs/methods/auto.md -> its meaning and the remedy
_REASONS: dict[str, str] = json.loads(Path(__file__).with_name("reasons.json").read_text(encoding="utf-8"))


class _Samples(dict[tuple[str, str], float]):
    """(name, value of the label that counts) -> value, of the text of /metrics."""

    def __init__(self, text: str) -> None:
        super().__init__()
        for name, labels, value in _SAMPLE.findall(text):
            key = (name.partition(":")[2] or name, " ".join(each for _, each in _LABEL.findall(labels)))
            self[key] = self.get(key, 0.0) + float(value)

    def of(self, name: str) -> float:
        return self.get((name, ""), 0.0)

    def by(self, name: str) -> dict[str, float]:
        return {label: value for (each, label), value in self.items() if each == name and value}

    def mean(self, name: str) -> float:
        return self.of(f"{name}_sum") / max(1.0, self.of(f"{name}_count"))


def check(url: str, key: str | None) -> Iterator[Finding]:
    """Look at a server; where it gives no answer, the list ends.

    Args:
        url: its address, with or without the ``/v1`` of clients.
        key: that it was started with; None: it has none.
    """
    root = url.rstrip("/").removesuffix("/v1")
    try:
        _get(root, "/health")
        version = json.loads(_get(root, "/version"))["version"]
        (model, *others) = json.loads(_get(root, "/v1/models", key))["data"]
        samples = _Samples(_get(root, "/metrics"))
        method = model["method"]
    except HTTPError as error:
        (why, *_) = [*re.findall(r'"message": ?"([^"]*)"', error.read().decode(errors="replace")), error.reason]
        remedy = _REMEDIES.get(error.code, "name the address that 'foretoken serve' prints")
        yield found("server", f"{url} answers with HTTP {error.code}: {why}", fail=remedy)
        return
    except (OSError, ValueError, KeyError, TypeError) as error:  # none runs, a server of another kind, no address
        remedy = "start 'foretoken serve', and name the address that it prints, such as http://127.0.0.1:8000"
        yield found("server", f"{url} is no server of foretoken ({getattr(error, 'reason', error)})", fail=remedy)
        return
    mine = version_of("foretoken")
    same = "" if version == mine else f"this command is {mine}: restart the server after an update"
    yield found("server", f"{root} answers, version {version}", warn=same)
    named = f"{model['root']}, context {model['max_model_len']:,}"
    yield found("model", f"{named}, called {', '.join(each['id'] for each in (model, *others))}")
    yield found("method", "; ".join([f"{method}, promises the {model['promise']}", *model.get("explanations", ())]))
    yield from _load(samples)
    yield from _drafting(samples, method)
    ignored = samples.of("ignored_fields_total")
    if ignored:
        remedy = "the header x-foretoken-ignored of an answer names them"
        yield found("fields", f"{ignored:.0f} fields of requests had no effect", warn=remedy)


def _get(root: str, path: str, key: str | None = None) -> str:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with urlopen(Request(root + path, headers=headers), timeout=_SECONDS) as answer:
        return str(answer.read().decode())


def _load(samples: _Samples) -> Iterator[Finding]:
    """Requests, their queue, their prompts, and memory."""
    ended, running = samples.by("request_success_total"), samples.of("num_requests_running")
    failed = ended.get("error", 0.0)
    facts = f"{sum(ended.values()):.0f} have ended, {failed:.0f} with an error; {running:.0f} run"
    yield found("requests", facts, warn="the answers and the server's log name the errors" if failed else "")
    waiting, queue = samples.of("num_requests_waiting"), samples.mean("request_queue_time_seconds")
    whole = samples.mean("e2e_request_latency_seconds")
    long = waiting > running or (whole > 0.0 and queue > _MOST_WAITING * whole)
    remedy = "raise --max-num-seqs if memory allows it, or start another server" if long else ""
    yield found("queue", f"{waiting:.0f} wait; {queue:.2f} s of {whole:.2f} s a request in the mean", warn=remedy)
    reading, placed = samples.mean("request_prefill_time_seconds"), samples.mean("request_inference_time_seconds")
    if placed:
        hits = samples.of("prefix_cache_hits_total") / max(1.0, samples.of("prompt_tokens_total"))
        much = reading > _MOST_READING * placed
        remedy = "prompts that begin alike are read once: put what varies last" if much else ""
        facts = f"reading them takes {reading / placed:.0%} of the time; {hits:.0%} of their tokens were read before"
        yield found("prompts", facts, warn=remedy)
    full, resident = samples.of("kv_cache_usage_perc"), samples.of("process_resident_memory_bytes")
    remedy = "--max-model-len or --kv-cache-dtype int8 holds more" if full > _FULL else ""
    taken = f"{resident / 1e9:.1f} GB in all; " if resident else ""
    yield found("memory", f"{taken}{full:.0%} of the places for keys and values are in use", warn=remedy)


def _drafting(samples: _Samples, method: str) -> Iterator[Finding]:
    """Tokens per step and acceptance, and why steps had no draft."""
    tokens, drafted = samples.of("generation_tokens_total"), samples.of("spec_decode_num_draft_tokens_total")
    if method == "none":
        yield found("drafting", "off: the server was started with --method none", warn="leave --method out")
        return
    if not tokens:
        yield found("drafting", "no token yet: ask the server something, then look again")
        return
    accepted = samples.of("spec_decode_num_accepted_tokens_total") / max(1.0, drafted)
    facts = f"{samples.of('tokens_per_step'):.2f} tokens a step; {drafted:.0f} draft tokens, {accepted:.0%} accepted"
    off, remedy = samples.by("speculation_off_steps_total"), ""
    if drafted and accepted < _FEW_ACCEPTED:
        remedy = "this draft seldom agrees on these texts: 'foretoken plan' on such prompts finds a better one"
    elif not drafted and not off:
        remedy = "this method found nothing to draft, or nothing that pays: leave --method out, or ask 'foretoken plan'"
    yield found("drafting", facts, warn=remedy)
    for code, steps in sorted(off.items(), key=lambda pair: -pair[1]):
        meaning, _, remedy = _REASONS.get(code, code).partition(": ")
        alone = not drafted and steps > sum(off.values()) / 2
        yield found("no draft", f"{steps:.0f} steps: {meaning}", warn=remedy if alone else "")
