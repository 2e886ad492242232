"""Everything that could draft for a target: the catalogue's drafters with the models at hand, and why others cannot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from foretoken import catalog, zoo
from foretoken.core.draft import Coupled, PointMass
from foretoken.drafting.learned_part import lies_beside
from foretoken.drafting.published.folder import takes
from foretoken.models.language_model import LanguageModel

NO_PART = "no trained network at hand (foretoken train)"
_DTYPES = ("int8", "int4")


@dataclass(slots=True)
class Candidate:
    """A drafter with its options, and later its prediction and measurement.

    Attributes:
        config: its ``speculative_config``; the length is added when it is chosen.
        reason: why it is not a choice, a clause; "": it may be one.
        plain_form: of a tree or a rounded drafter, the same with default options.
        length: draft tokens of its best prediction.
        predicted, error: times plain decoding, and half of the interval of 90 %.
        predicted_of_run: the same of the prompts that were run for real.
        measured, spread: times plain decoding in the real run, and its interval of 90 %.
        measured_tokens_per_second: of whole answers.
        differs: whether prediction and measurement differ by more than the error.
        tokens_per_step, needed: at the best length, and the tokens with which it would be as fast as plain decoding.
        draft_share: the part of a step that drafting takes.
        by_length: predicted times plain decoding, by draft tokens.
        by_context, by_requests: the same at the best length while decoding.
        lengths_by_requests: the best length for each number of requests; 0: none pays.
        seconds: predicted, of each replayed answer at the best length.
        replayed: False where its steps do not follow from the recorded text.
    """

    config: dict[str, Any]
    reason: str = ""
    plain_form: "Candidate | None" = None
    length: int = 0
    predicted: float = 0.0
    error: float = 0.0
    predicted_of_run: float = 0.0
    measured: float | None = None
    spread: tuple[float, float] | None = None
    measured_tokens_per_second: float | None = None
    differs: bool = False
    tokens_per_step: float = 0.0
    needed: float = 0.0
    draft_share: float = 0.0
    by_length: dict[int, float] = field(default_factory=dict)
    by_context: dict[int, float] = field(default_factory=dict)
    by_requests: dict[int, float] = field(default_factory=dict)
    lengths_by_requests: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    replayed: bool = True

    @property
    def label(self) -> str:
        """The method and its options in words."""
        method = self.config["method"]
        options = [f"{key}={value}" for key, value in self.config.items() if key not in ("method", "verifier", "model")]
        draft = [f"draft {self.config['model']}"] if "model" in self.config else []
        return ", ".join([method, *draft, *options])

    @property
    def rate(self) -> float:
        """Times plain decoding: measured where it was."""
        return self.predicted if self.measured is None else self.measured

    @property
    def settings(self) -> dict[str, Any]:
        """Its ``speculative_config`` with the best length."""
        return {**self.config, "num_speculative_tokens": self.length} if self.length else dict(self.config)


def clause(error: Exception) -> str:
    """The first clause of a message."""
    text = " ".join(str(error).split())
    for mark in (": ", "; ", " ("):
        text = text.split(mark)[0] if len(text.split(mark)[0]) > 20 else text
    return text if len(text) <= 90 else f"{text[:87]}…"


def candidates(
    target: LanguageModel, drafts: Sequence[str], methods: Sequence[str] | None, *, greedy: bool
) -> list[Candidate]:
    """Every drafter with every model that may draft for the target: plain forms first, then trees, then rounded ones.

    Args:
        drafts: draft models and folders of published heads, as the user named them.
        methods: names to look at; None: the whole catalogue.
        greedy: whether the trace is of temperature 0.
    Raises:
        ConfigError: an unknown method.
    """
    entries = [
        each
        for each in (catalog.entries("drafter") if methods is None else [catalog.find(n, "drafter") for n in methods])
        if each.name != "none"
    ]
    entries.sort(key=lambda each: not is_tried(each))
    found: list[list[Candidate]] = [[], [], []]
    for entry in entries:
        for config in _configs(entry, target, drafts):
            if isinstance(config, Candidate):
                found[0].append(config)
                continue
            plain = Candidate(config)
            found[0].append(plain)
            shapes = _shapes(entry, greedy=greedy)
            found[1] += [Candidate({**config, **shape}, plain_form=plain) for shape in shapes]
            dtypes = _dtypes(entry, target)
            found[2] += [Candidate({**config, "dtype": dtype}, plain_form=plain) for dtype in dtypes]
    return [each for group in found for each in group]


def is_tried(entry: catalog.Entry) -> bool:
    """Whether it is tried however late it is: look-ups take a moment, and the default must be compared."""
    declared = entry.load().declared
    return declared.finds_model or not (declared.draft_model or declared.learned_part is not None)


def _configs(
    entry: catalog.Entry, target: LanguageModel, drafts: Sequence[str]
) -> Iterator[dict[str, Any] | Candidate]:
    """The plain forms of one drafter, or the reason why it has none."""
    kind = entry.load()
    declared = kind.declared
    base: dict[str, Any] = {"method": entry.name}
    if entry.own_rule is not None:
        base["verifier"] = "auto"  # its own rule gives another text
    if declared.datastore:
        yield Candidate(base, "it needs a datastore (foretoken datastore build)")
    elif declared.draft_model:
        named = list(drafts) or ([zoo.DRAFT] if zoo.drafts_for(zoo.DRAFT, target.name) else [])
        for each in drafts if declared.finds_model else named:
            if takes(entry.name, kind, each):
                yield {**base, "model": each}
        if not drafts and declared.finds_model:
            yield base
        elif not named:
            yield Candidate(base, "no draft model at hand (--draft-model)")
    elif declared.learned_part is not None and not declared.brought:
        folders = [each for each in drafts if takes(entry.name, kind, each)]
        part = catalog.imported(declared.learned_part)
        for each in folders:
            yield {**base, "model": each}
        if not folders and lies_beside(part, target.source):
            yield base
        elif not folders:
            yield Candidate(base, NO_PART)
    else:
        yield base


def _shapes(entry: catalog.Entry, *, greedy: bool) -> list[dict[str, Any]]:
    """Other values of its option ``tree`` that give deterministic drafts."""
    kind = entry.load()
    names = {each.name: each.default for each in fields(kind.Config)}
    if "tree" not in names:
        return []
    found = []
    for variant in kind.declared.variants:
        laws = variant.laws or kind.laws
        tree = variant.options.get("tree", names["tree"])
        coupled = Coupled in laws
        if tree != names["tree"] and set(laws) <= {PointMass, Coupled} and not (coupled and greedy):
            found.append({"tree": tree})
    return [each for place, each in enumerate(found) if each not in found[:place]][:2]


def _dtypes(entry: catalog.Entry, target: LanguageModel) -> tuple[str, ...]:
    names = {each.name for each in fields(entry.load().Config)}
    return _DTYPES if "dtype" in names and target.native_decoder is not None else ()
