"""A draft vocabulary: the tokens that a drafter may propose, in a folder of ``foretoken calibrate vocabulary``.

    config.json        {"architectures": ["DraftVocabulary"], "speculators_model_type": "draft_vocabulary",
                        "speculators_config": {"algorithm": "vocabtrim", "verifier": {"name_or_path": "zoo:base"}},
                        "vocab_size": 8192, "draft_vocab_size": 1024, "tokenizer": "5d1c…", "context_rows": 256, ...}
    model.safetensors  d2t int64 [K]: row j of the draft's head is token j + d2t[j]
                       t2d bool [V]: whether a token is kept

The maps are those of EAGLE-3, so that a folder of such a head is a draft vocabulary, too (without ``tokenizer`` only
the number of tokens can be compared). There are no weights: rows are taken from the drafter's head when it is loaded.

Letters: K tokens kept, V vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, MismatchError, ModelError
from foretoken.core.files import check_format, home_expanded, write_whole
from foretoken.drafting.feature_heads.draft_ids import MAPS, ids_of, maps_of
from foretoken.drafting.learned_part import FORMAT, FORMAT_KEY
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Option

CONFIG, MAPS_FILE = "config.json", "model.safetensors"
CONTEXT_ROWS = 256
_KIND = "draft_vocabulary"
_MOST_CONTEXT_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Which tokens a drafter scores.

    Attributes:
        ids: the tokens kept, increasing.
        vocab_size: V.
        tokenizer: fingerprint of the tokenizer of these ids; "": unknown.
        target: name of the model for which they were counted.
        context_rows: tokens of a request's own prompt and output that it scores next to them, at most.
        counted: the counted texts and the coverage; for people, no code reads it.
    Raises:
        ValueError: ids that are no increasing tokens of the vocabulary; the message names the field.
    """

    ids: Sequence[int]
    vocab_size: int
    tokenizer: str = ""
    target: str = ""
    context_rows: int = CONTEXT_ROWS
    counted: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = torch.tensor(list(self.ids), dtype=torch.int64)
        if not len(ids):
            raise ValueError("draft_vocab_size=0: a drafter needs one token at least")
        if bool((ids[1:] <= ids[:-1]).any()):
            raise ValueError("d2t: the tokens are not in increasing order, each once")
        if int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise ValueError(f"d2t: tokens go from {ids[0]} to {ids[-1]}, but vocab_size={self.vocab_size}")
        rows = self.context_rows
        if type(rows) is not int or not 0 <= rows <= _MOST_CONTEXT_ROWS:
            raise ValueError(f"context_rows={rows!r} must be an integer from 0 to {_MOST_CONTEXT_ROWS}")

    def __len__(self) -> int:
        return len(self.ids)

    def save(self, folder: Path) -> None:
        """Write the folder; each file replaces a whole one or none.

        Raises:
            ConfigError: something else lies in the folder.
            ForetokenError: a file cannot be written.
        """
        from safetensors.torch import save

        check_place(folder)
        folder.mkdir(parents=True, exist_ok=True)
        ids_K = torch.tensor(list(self.ids), dtype=torch.int64)
        settings = {
            "architectures": ["DraftVocabulary"],
            "speculators_model_type": _KIND,
            "speculators_config": {"algorithm": "vocabtrim", "verifier": {"name_or_path": self.target}},
            "vocab_size": self.vocab_size,
            "draft_vocab_size": len(ids_K),
            "tokenizer": self.tokenizer,
            "context_rows": self.context_rows,
            "counted": dict(self.counted),
            FORMAT_KEY: FORMAT,
        }
        write_whole(folder / MAPS_FILE, save(maps_of(ids_K, self.vocab_size)))
        write_whole(folder / CONFIG, json.dumps(settings, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "DraftVocabulary":
        """Read a folder that holds both maps.

        Raises:
            ModelError: there is none, or it is damaged; the message names the field.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for name in (CONFIG, MAPS_FILE):
            if not (folder / name).is_file():
                raise ModelError(
                    f"draft_vocab={folder}: has no {name}; make one with 'foretoken calibrate vocabulary --model M "
                    "--corpus FILE --size K --out DIR'"
                )
        try:
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            tensors = load_file(folder / MAPS_FILE)
            if not isinstance(settings, dict):
                raise ValueError(f"{CONFIG} is no object")
            check_format(settings.get(FORMAT_KEY, 1), FORMAT)
            return cls._of(settings, tensors)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise ModelError(f"draft_vocab={folder}: {error}") from None

    @classmethod
    def _of(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "DraftVocabulary":
        for name in MAPS:
            if name not in tensors:
                raise ValueError(f"{MAPS_FILE} has no '{name}'")
        d2t_K, t2d_V = (tensors[name] for name in MAPS)
        size, vocab_size = settings.get("draft_vocab_size", len(d2t_K)), settings.get("vocab_size", len(t2d_V))
        ids_K = ids_of(size, vocab_size, d2t_K, t2d_V)
        assert ids_K is not None
        owner = settings.get("speculators_config")
        verifier = owner.get("verifier") if isinstance(owner, dict) else None
        return cls(
            ids=ids_K.tolist(),
            vocab_size=vocab_size,
            tokenizer=str(settings.get("tokenizer", "")),
            target=str(verifier.get("name_or_path", "")) if isinstance(verifier, dict) else "",
            context_rows=settings.get("context_rows", CONTEXT_ROWS),
            counted=settings.get("counted", {}),
        )

    def check_model(self, model: LanguageModel) -> None:
        """Refuse a vocabulary with ids of another model.

        Raises:
            MismatchError: they were counted with another tokenizer, or there are more than the model's head has.
        """
        remedy = f"make one with 'foretoken calibrate vocabulary --model {model.name} --corpus FILE --size K --out DIR'"
        if self.tokenizer and self.tokenizer != vocabulary_fingerprint(model.tokenizer):
            raise MismatchError(
                f"draft_vocab: the field tokenizer={self.tokenizer[:12]} is that of '{self.target}', and "
                f"'{model.name}' has another tokenizer: {remedy}"
            )
        if not self.tokenizer and self.vocab_size != model.vocab_size:
            raise MismatchError(
                f"draft_vocab: vocab_size={self.vocab_size}, but '{model.name}' has {model.vocab_size} tokens: {remedy}"
            )
        if self.ids[-1] >= model.vocab_size:
            raise MismatchError(
                f"draft_vocab: d2t names token {self.ids[-1]}, but '{model.name}' has {model.vocab_size}: {remedy}"
            )


OPTION = Option(
    "A folder of `foretoken calibrate vocabulary` (docs/methods/vocabtrim.md): only its tokens are drafted; None: all."
)
"""Of drafters that can do with a part of the vocabulary."""


def find(given: str | Path | None, model: LanguageModel) -> DraftVocabulary | None:
    """The draft vocabulary that an option names, known to fit a model; None without the option.

    Raises:
        ConfigError: the folder begins with a home folder that does not exist.
        ModelError: there is none in it, or it is damaged.
        MismatchError: it is another tokenizer's.
    """
    if given is None:
        return None
    try:
        folder = home_expanded(given)
    except RuntimeError:
        raise ConfigError(f"draft_vocab={given!r}: there is no such home folder") from None
    found = DraftVocabulary.load(folder)
    found.check_model(model)
    return found


def check_place(folder: Path) -> None:
    """Refuse to write over something that is no draft vocabulary.

    Raises:
        ConfigError: it is a file, or a folder with another model in it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder")
    path = folder / CONFIG
    if not path.is_file():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = None
    if not isinstance(settings, dict) or settings.get("speculators_model_type") != _KIND:
        raise ConfigError(f"{folder}: another model lies there; name another folder")
