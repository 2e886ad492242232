"""SPRINTER's judge: a logistic head on a draft model's last hidden state.

    tokens ── embedding ── layers[0] ─ … ─ layers[L-1] ── final norm ── h ── the draft's head ── q
                                                                        └── sigmoid(w.h + b) = v

Paper: arXiv:2502.04557. v estimates that a draft token would be accepted; d + 1 numbers are trained. Which token:

    pre   the one that is drawn from the q that h produced: the token is not known to the head (as published)
    post  the one that was read last: h is the state after it

Letters: M rows, D width.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.core.files import write_whole
from foretoken.drafting.logistic import Logistic, reading
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel

CONFIG, WEIGHTS = "sprinter.json", "sprinter.safetensors"
FEATURES = ("pre", "post")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What a head is, and whose.

    Attributes:
        feature: "pre" or "post", see above.
        width: of the draft's hidden states.
        target, draft: what the pair was called when the head was trained.
        target_fingerprint, draft_fingerprint: models/fingerprint.py; it is of no use to another pair.
    """

    feature: str
    width: int
    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str


class SprinterHead:
    """w and b, and what they say.

    Args:
        config: whose it is.
        unit: w and b.
    """

    def __init__(self, config: HeadConfig, unit: Logistic) -> None:
        self.config = config
        self.unit = unit

    def judge(self, h_MD: Tensor) -> list[float]:
        """v of each row, in [0, 1]."""
        found: list[float] = self.unit.probabilities(h_MD).tolist()
        return found

    def save(self, folder: Path) -> None:
        """Write ``sprinter.json`` and ``sprinter.safetensors``; each replaces a whole file or none."""
        folder.mkdir(parents=True, exist_ok=True)
        self.unit.save(folder / WEIGHTS)
        write_whole(folder / CONFIG, json.dumps(asdict(self.config), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> SprinterHead:
        """Read a saved head.

        Raises:
            ModelError: there is none, or it is damaged.
        """
        with reading(folder, "SPRINTER head", CONFIG, WEIGHTS):
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            config = HeadConfig(**{each.name: settings[each.name] for each in fields(HeadConfig)})
            _check(config)
            return cls(config, Logistic.load(folder / WEIGHTS, config.width))

    def check_pair(self, target: LanguageModel, draft: LanguageModel) -> None:
        """Refuse a head of another pair.

        Raises:
            MismatchError: it was trained for another target, or on another draft.
        """
        config = self.config
        for role, model, name, print_of in (
            ("target", target, config.target, config.target_fingerprint),
            ("draft", draft, config.draft, config.draft_fingerprint),
        ):
            if print_of != fingerprint_of(model.source):
                raise MismatchError(
                    f"the head was trained for the {role} '{name}' (fingerprint {print_of[:12]}), not for "
                    f"'{model.name}' as it is now: train one with 'foretoken train sprinter --target {target.name} "
                    f"--draft {draft.name} --out DIR'"
                )
        width = draft.config.get_text_config(decoder=True).hidden_size
        if config.width != width:
            raise MismatchError(f"the head reads {config.width} numbers, but '{draft.name}' has states of {width}")


def _check(config: HeadConfig) -> None:
    """Raise ValueError where the file says what no head can be."""
    if config.feature not in FEATURES:
        raise ValueError(f"feature={config.feature!r}")
    for name in ("target", "target_fingerprint", "draft", "draft_fingerprint"):
        if not isinstance(getattr(config, name), str):
            raise ValueError(f"{name}={getattr(config, name)!r}")
