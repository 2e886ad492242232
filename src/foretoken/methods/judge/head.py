"""Judge Decoding's head: a logistic unit on the target's last hidden state, which says whether a token is fine.

    … d_i ── layers[0] ─ … ─ layers[L-1] ── final norm ── e_i ── the target's head ── p of the token after d_i
                                                           └── sigmoid(w.e_i + b) = P(d_i is fine)

Paper: arXiv:2501.19309, section 4. D + 1 numbers are trained, the target stays as it is. ``e_i`` is the state *of* the
token, after the target has read it: not the state that predicted it, which SPRINTER's head reads.
Differs: the paper does not say whether the state is normed; ``normed`` says which one a head reads.

A folder holds ``config.json`` and ``model.safetensors`` in the manner of the speculators format:

    {"architectures": ["JudgeHead"], "speculators_model_type": "judge", "width": 256, "normed": true, "threshold": 0.9,
     "speculators_config": {"algorithm": "judge", "verifier": {"name_or_path": "zoo:base", "fingerprint": "4792..."}}}

Letters: M rows, D width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.core.files import write_whole
from foretoken.drafting.logistic import Logistic, reading
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BUNDLED = "judge"  # folder of a head beside the target's weights
_KIND = "judge"


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """What a head is, and whose.

    Attributes:
        width: of the target's hidden states.
        threshold: from which probability on, exclusive, its word is good; chosen when it was trained. 1: never.
        target: what the target was called when the head was trained.
        target_fingerprint: models/fingerprint.py; it is of no use to another target.
        normed: it reads the state behind the final norm, as the target's own head does; False: before it.
    """

    width: int
    threshold: float
    target: str
    target_fingerprint: str
    normed: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError where it says what no head can be."""
        if type(self.width) is not int or self.width < 1:
            raise ValueError(f"width={self.width!r}")
        if type(self.threshold) not in (int, float) or not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold!r} is no probability")
        if type(self.normed) is not bool:
            raise ValueError(f"normed={self.normed!r}")
        for name in ("target", "target_fingerprint"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}")

    def as_json(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        verifier = {"name_or_path": self.target, "fingerprint": self.target_fingerprint}
        return {
            "architectures": ["JudgeHead"],
            "speculators_model_type": _KIND,
            "speculators_config": {"algorithm": _KIND, "verifier": verifier},
            "width": self.width,
            "normed": self.normed,
            "threshold": self.threshold,
        }

    @classmethod
    def of_json(cls, settings: dict[str, Any]) -> JudgeConfig:
        """The other way round.

        Raises:
            ValueError, KeyError, TypeError: these are not the settings of such a head.
        """
        if not isinstance(settings, dict) or settings.get("speculators_model_type") != _KIND:
            raise ValueError(f"{CONFIG} is not of a judge: it has no speculators_model_type '{_KIND}'")
        verifier = settings["speculators_config"]["verifier"]
        return cls(
            width=settings["width"],
            threshold=settings["threshold"],
            target=verifier["name_or_path"],
            target_fingerprint=verifier["fingerprint"],
            normed=settings["normed"],
        )


class JudgeHead:
    """A head and what it says.

    Args:
        config: whose it is.
        unit: w and b of the states as the target gives them; whatever scaling they were trained under is folded in.
    """

    def __init__(self, config: JudgeConfig, unit: Logistic) -> None:
        self.config = config
        self.unit = unit

    def judge(self, hidden_MD: Tensor) -> Tensor:
        """P(token is fine), float32 [M], from the states of M tokens, [M, D] of any float type."""
        return self.unit.probabilities(hidden_MD)

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; each replaces a whole file or none."""
        folder.mkdir(parents=True, exist_ok=True)
        self.unit.save(folder / WEIGHTS)
        write_whole(folder / CONFIG, json.dumps(self.config.as_json(), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> JudgeHead:
        """Read a saved head.

        Raises:
            ModelError: there is none, it is of another kind, or it is damaged.
        """
        with reading(folder, "judge", CONFIG, WEIGHTS):
            config = JudgeConfig.of_json(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
            return cls(config, Logistic.load(folder / WEIGHTS, config.width))

    def check_target(self, target: LanguageModel) -> None:
        """Refuse a head of another target.

        Raises:
            MismatchError: it was trained on other weights, or reads states of another width.
        """
        config = self.config
        if config.target_fingerprint != fingerprint_of(target.source):
            raise MismatchError(
                f"the judge was trained on the target '{config.target}' (fingerprint "
                f"{config.target_fingerprint[:12]}), not on '{target.name}' as it is now: train one with "
                f"'foretoken train judge --target {target.name} --draft DRAFT --out DIR'"
            )
        width = target.config.get_text_config(decoder=True).hidden_size
        if config.width != width:
            raise MismatchError(f"the judge reads {config.width} numbers, but '{target.name}' has states of {width}")
