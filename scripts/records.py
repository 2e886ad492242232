"""Writes the tables that follow from records of measurements, and finds the faults of a record.

    python scripts/records.py

``lab/results/NAME.json`` and ``NAME.jsonl`` are records: figures, and a ``provenance`` that says where they come from.
A record is sound if it names a commit without ``-dirty``, command, processor and the checksums of the bundled weights
that it measured, and these are the weights of today. Others are withdrawn: no page of the documentation may quote them.

A page of results holds ``<!-- records -->``; the table after it names the records that the page links, with their
state. Any page may hold ``<!-- measured: TABLE ROW ROW -->``; the table after it is made from a record (``TABLES``).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.core.provenance import bundled_weights
from foretoken.zoo.pretrained import PRETRAINED
from foretoken_lab.option_tables import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "lab" / "results"
ZOO = Path(zoo.__file__).parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "lab" / "README.md",
    ZOO / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
OF_RESULTS = [page for page in sorted(RESULTS.glob("*.md")) if page.stem not in ("README", "mutants")]
ORIGINS = re.compile(r"(<!-- records -->\n).*?(<!-- end of records -->\n)", flags=re.DOTALL)
MEASURED = re.compile(r"(<!-- measured: (\w+)((?: [\w+=.-]+)*) -->\n).*?(<!-- end of measured -->\n)", flags=re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+\.jsonl?)\)")
NO_RECORD = "**Withdrawn:** no record of these figures was kept."

_BUNDLED = re.compile(r"\b(?:zoo:|grown:(?:zoo:)?)([\w-]+)")
_DRAFTED = re.compile(r"zoo:draft|draft_model")


def parts(record: Path) -> list[dict[str, Any]]:
    """The JSON objects of a record: one, or one a line."""
    text = record.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if record.suffix == ".jsonl" else [json.loads(text)]


def origins(part: Any) -> Iterator[dict[str, Any]]:
    """Every ``provenance`` within a record."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "provenance":
                yield value
            else:
                yield from origins(value)
    elif isinstance(part, list):
        for value in part:
            yield from origins(value)


@functools.cache
def weights_of_today() -> dict[str, str]:
    """Checksums of all bundled weights."""
    return bundled_weights({folder.name for folder in ZOO.iterdir() if folder.is_dir()})


def faults(record: Path) -> list[str]:
    """Why a record may not be quoted; nothing if it is sound."""
    found: list[str] = []
    for part in parts(record):
        of_part = list(origins(part))
        found += [] if of_part else ["it has no provenance"]
        for origin in of_part:
            found += _faults(origin, json.dumps(part))
    return sorted(set(found))


def _faults(origin: dict[str, Any], text: str) -> list[str]:
    commit = origin.get("commit") or ""
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        return ["the code was not committed" if commit else "it names no commit"]
    if missing := [name for name in ("command", "cpu", "models") if name not in origin]:
        return [f"it names no {' and no '.join(missing)}"]
    then, now = origin["models"], weights_of_today()
    text = text.replace(json.dumps(then), "")
    named = {folder for name in _BUNDLED.findall(text) for folder in (name, f"{name}-tasks")}
    folders = named | {weights.split("/")[0] for weights in then}
    bundled = {weights for weights in {*then, *now} if not Path(weights).suffix}  # other files keep their suffix
    found = {weights for weights in bundled if then.get(weights) != now.get(weights)}
    former = {_owner(weights) for weights in found if _is_measured(weights, folders, text)}
    models = set(_BUNDLED.findall(text)) - set(PRETRAINED)  # those that are fetched have a checksum of their own
    gone = {name for name in models if not {f"{name}/model", f"{name}-tasks/model"} & now.keys()}
    return [
        *(f"it measured a former `{name}`" for name in former),
        *(f"`{name}` is no longer bundled" for name in gone),
    ]


def _is_measured(weights: str, folders: set[str], text: str) -> bool:
    """Whether a record is about a file of weights: its model is named, and if it is a head its method is, too."""
    folder, *head = weights.split("/")[:-1]
    if folder == "draft" and not _DRAFTED.search(text):
        return False
    return folder in folders and all(part in text for part in head[:1])


def _owner(weights: str) -> str:
    """``base`` of ``base/model``, ``base/kangaroo`` of ``base/kangaroo/exit-1/model``."""
    return "/".join(weights.split("/")[:-1][:2])


def linked(page: Path, text: str) -> list[Path]:
    """The records that a text of a page links."""
    return sorted({(page.parent / link).resolve() for link in LINK.findall(text)})


def table_of_records(page: Path, text: str) -> list[str]:
    """Where the figures of a page of results come from."""
    records = linked(page, ORIGINS.sub("", text))
    if not records:
        return [NO_RECORD]
    return markdown(("record", "commit", "measured", "state"), [_row(record) for record in records])


def _row(record: Path) -> tuple[str, str, str, str]:
    of_record = [origin for part in parts(record) for origin in origins(part)]
    commits = sorted({(origin.get("commit") or "none")[:8] for origin in of_record}) or ["none"]
    dates = sorted({origin["date"][:10] for origin in of_record if origin.get("date")}) or ["not known"]
    wrong = faults(record)
    state = f"**withdrawn:** {'; '.join(wrong)}" if wrong else "sound"
    return f"[`{record.name}`]({record.name})", ", ".join(commits), ", ".join(dates), state


def results_of(name: str) -> list[dict[str, Any]]:
    """The rows of a record of ``foretoken bench``."""
    rows: list[dict[str, Any]] = parts(RESULTS / f"{name}.json")[0]["results"]
    return rows


def by_category(name: str, rows: list[str]) -> list[str]:
    """Tokens per step of ``foretoken bench``, and total variation if a rule has one; rows: drafters or verifiers."""
    chosen = [each for each in results_of(name) if rows == [] or _kind(each["method"]) in rows]
    categories = list(chosen[0]["by_category"])
    lossy = any(each["distortion"] for each in chosen)
    shown = [
        (
            _label(each["method"]),
            f"{each['tokens_per_step']:.2f}",
            *(f"{each['by_category'][category]['tokens_per_step']:.2f}" for category in categories),
            *([f"{each['distortion']:.3f}"] if lossy else []),
        )
        for each in chosen
    ]
    return markdown(("tokens per step", "all", *categories, *(["TV"] if lossy else [])), shown)


def _kind(method: str) -> str:
    """What a row is about: the rule that verifies a draft model's drafts, if it is named, else the drafter."""
    drafter, *options = method.split("+")
    rules = [each.removeprefix("verifier=") for each in options if each.startswith("verifier=")]
    return rules[0] if rules and drafter == "draft_model" else drafter


def _label(method: str) -> str:
    _, *options = method.split("+")
    kind = _kind(method)
    hidden = ("model=zoo:draft", *([] if method.startswith(kind) else [f"verifier={kind}"]))
    shown = [each for each in options if each not in hidden and not each.startswith("num_speculative_tokens=")]
    return " ".join(f"`{each}`" for each in (kind, *shown))


def tradeoff(name: str, rules: list[str]) -> list[str]:
    """Tokens per step, total variation and right answers by task, of ``foretoken analyze tradeoff``.

    Exact verification with a draft length that follows the clock is left out: it is another one in every run.
    """
    points = parts(RESULTS / f"{name}.json")[0]["settings"][0]["points"]
    exact = [each for each in points if each["rule"] == "exact"]
    exact = [each for each in exact if each["knob"]] or exact
    lossy = [each for each in points if each["rule"] not in ("plain", "draft", "exact")]
    chosen = exact + [each for each in lossy if not rules or each["rule"].partition("+")[0] in rules]
    tasks = list(chosen[0]["by_task"])
    shown = [
        (
            f"`{each['label']}`",
            f"{each['tokens_per_step']:.2f}",
            f"{each['distortion']:.3f}",
            *(_accuracy(each["by_task"][task], each in exact) for task in tasks),
        )
        for each in chosen
    ]
    return markdown(("rule", "tokens per step", "TV", *tasks), shown)


def _accuracy(task: dict[str, Any], is_exact: bool) -> str:
    """Per cent, and the interval of the difference from exact verification in points."""
    right = f"{100 * task['accuracy']:.0f}"
    if is_exact:
        return right
    low, high = (f"{100 * task['difference'][side]:+.0f}" for side in ("low", "high"))
    return f"{right} ({low} to {high})"


def rounding(name: str, rows: list[str]) -> list[str]:
    """What rounding does to distributions, of ``lab/benchmarks/rounding_error.py``."""
    shown = [
        (
            each["model"].removesuffix(".gguf"),
            f"keys and values {each['kv_cache_dtype']}" if each["dtype"] == "float32" else f"`{each['dtype']}`",
            *(f"{each[figure]:.2g}" for figure in ("mean_kl", "median_kl", "p99_kl")),
            f"{100 * each['same_best']:.1f} %",
            f"{100 * each['perplexity']:+.1f} %",
        )
        for each in parts(RESULTS / f"{name}.jsonl")
    ]
    return markdown(("model", "dtype", "mean KL", "median", "p99", "same best token", "perplexity"), shown)


def accuracy(name: str, rows: list[str]) -> list[str]:
    """Right answers in per cent with their 95 % interval, of ``foretoken eval --task``."""
    records = [each for each in parts(RESULTS / f"{name}.jsonl") if "task" in each]
    tasks = list(dict.fromkeys(f"{each['task']}, of {each['num_examples']}" for each in records))
    found: dict[str, dict[str, str]] = {}
    for each in records:
        low, high = (f"{100 * side:.0f}" for side in each["interval"])
        row = f"{each['model']} {each['provenance']['dtype']}"
        found.setdefault(row, {})[f"{each['task']}, of {each['num_examples']}"] = (
            f"{100 * each['accuracy']:.1f} ({low} to {high})"
        )
    shown = [(f"`{row}`", *(cells.get(task, "") for task in tasks)) for row, cells in found.items()]
    return markdown(("", *tasks), shown)


def soaked(name: str, rows: list[str]) -> list[str]:
    """What became of the requests of ``lab/benchmarks/soak.py``, and the server's memory."""
    found = parts(RESULTS / f"{name}.json")[0]["results"]
    lives = [f"{life[len(life) // 2]:,} to {life[-1]:,}" for life in found["memory_mb"]]
    shown = [
        ("answered, and compared with the library", f"{found['answered']:,}"),
        ("given up by the client", f"{found['given_up']:,}"),
        ("kills of the server; requests that were sent again for them", f"{found['kills']}; {found['sent_again']}"),
        ("texts in the answers; tokens", f"{found['completions']:,}; {found['tokens']:,}"),
        ("faults: other texts, lost or broken answers, wrong states, slots or counters", f"{len(found['faults'])}"),
        ("memory of each server, MB, from the half of its time to its end", "; ".join(lives)),
    ]
    return markdown(("", "requests"), shown)


CHEAPEST = "ngram"
DRAFT_MODEL = ("draft_model", "block")  # the plain forms: greedy, and sampled
PLAINER = {  # card -> simpler methods that it must beat as well
    "rasd": ("suffix_first",),  # a switch between the sources that RASD fuses
    "sprinter": ("draft_model_20",),  # exact drafts of SPRINTER's length
}


def of_papers(name: str, cards: list[str]) -> list[str]:
    """What each method gains over plain decoding and over copying, of ``lab/benchmarks/eighteen.py``."""
    rows = parts(RESULTS / f"{name}.json")[0]["rows"]
    shown = [
        (
            f"[`{row['method']}`]({row['card']}.md)",
            f"`{row['target']}`, {row['prompts'].partition(', with ')[0]}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['speedup']:.2f}x ({row['spread'][0]:.2f} to {row['spread'][1]:.2f})",
            _best_and_worst(row["by_category"]),
            "not known" if row["distortion"] is None else f"{row['distortion']:.3f}" if row["distortion"] else "0",
            _verdict(row, [each for each in rows if _setting(each) == _setting(row)]),
        )
        for card in cards
        for row in rows
        if row["card"] == card
    ]
    columns = ("method", "measured with", "tokens per step", "speed to plain", "by kind of prompt", "TV", "it pays")
    return markdown(columns, shown)


def first_line(name: str, cards: list[str]) -> list[str]:
    """The first line of a card: whether the method pays, with which model and prompts, from the same record."""
    rows = parts(record_of(name))[0]["rows"]
    row = next(each for each in rows if each["card"] == cards[0])
    answer, _, reason = _verdict(row, [each for each in rows if _setting(each) == _setting(row)]).partition(": ")
    speed = f"{row['speedup']:.2f} times plain decoding" + (f"; {reason}" if reason else "")
    lossy = f" Its text is not the target's: TV {row['distortion']:.3f}." if row["distortion"] else ""
    where = f"with `{row['target']}`, {row['prompts'].partition(', with ')[0]}"
    pays = "It pays" if answer == "yes" else "It does not pay"
    return [f"**{pays}** {where}: {speed} ([all eighteen](README.md)).{lossy}"]


def _setting(row: dict[str, Any]) -> tuple[str, str]:
    return row["target"], row["prompts"]


def _best_and_worst(categories: dict[str, dict[str, float]]) -> str:
    """The kinds of prompts with the highest and the lowest speed."""
    ordered = sorted(categories, key=lambda name: categories[name]["speedup"])
    return ", ".join(f"{name} {categories[name]['speedup']:.2f}x" for name in dict.fromkeys((ordered[-1], ordered[0])))


def _verdict(row: dict[str, Any], setting: list[dict[str, Any]]) -> str:
    """Whether a method is faster than plain decoding, than copying, and than simpler forms of it."""
    if row["tokens_per_step"] < 1.05:
        return "no: it hardly drafts here"
    if row["spread"][0] <= 1:
        return "no: not faster than plain decoding in every repeat"
    plainer = (CHEAPEST, *(DRAFT_MODEL if _has_draft_model(row) else ()), *PLAINER.get(row["card"], ()))
    for other in setting:
        if other["card"] in plainer and other["card"] != row["card"] and other["speedup"] >= row["speedup"]:
            return f"no: `{other['method']}` makes {other['speedup']:.2f}x"
    return "yes"


def _has_draft_model(row: dict[str, Any]) -> bool:
    return row["method"].startswith("draft_model") or row["card"] in ("rasd", "sprinter", "entropy_adaptive")


TABLES = {
    "drafters": by_category,
    "eighteen": of_papers,
    "first_line": first_line,
    "rules": by_category,
    "diffuspec_rule": by_category,
    "tradeoff": tradeoff,
    "tradeoff_sprinter": tradeoff,
    "rounding_error": rounding,
    "zoo_tasks": accuracy,
    "zoo_other_models": accuracy,
    "quantised": accuracy,
    "soak": soaked,
}
OTHER_RECORDS = {"first_line": "eighteen"}  # table -> its record, where the name is another


def record_of(table: str) -> Path:
    """The record that a table is made from."""
    return next(path for path in RESULTS.glob(f"{OTHER_RECORDS.get(table, table)}.json*"))


def rewritten(page: Path, text: str) -> str:
    """A page with its tables as the records give them now."""

    def measured(place: re.Match[str]) -> str:
        table = TABLES[place[2]](place[2], place[3].split())
        return place[1] + "\n".join(["", *table, ""]) + "\n" + place[4]

    text = MEASURED.sub(measured, text)
    made = "\n".join(["", *table_of_records(page, text), ""]) if ORIGINS.search(text) else ""
    return ORIGINS.sub(lambda place: place[1] + made + "\n" + place[2], text)


if __name__ == "__main__":
    for page in (*PAGES, *OF_RESULTS):
        page.write_text(rewritten(page, page.read_text(encoding="utf-8")), encoding="utf-8")
