"""The zoo: small real models of every kind; ``zoo:NAME`` wherever a model is named.

Some are bundled next to this file, as ordinary Hugging Face folders. Others of our own are made by one command, and
pretrained models of other authors are fetched by one (pretrained.py, fetch.py); they lie in a folder of the user's.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.zoo.pretrained import PRETRAINED

PREFIX = "zoo:"
ENVIRONMENT = "FORETOKEN_ZOO"
_HERE = Path(__file__).resolve().parent

MODELS: dict[str, str] = json.loads((_HERE / "models.json").read_text(encoding="utf-8"))  # name -> description

# weights that lie in a folder of another name, under which results and records know them
_FOLDERS = {"moe": "moe-tasks", "hybrid": "hybrid-tasks", "long": "long-tasks"}

# what drafts where no draft is named, and for which: zoo:draft has base's words, zoo:diffusion the tokens of all
DRAFT = "zoo:draft"
_DRAFTS = {DRAFT: frozenset({"base"}), "zoo:diffusion": frozenset(MODELS)}
_TARGET = re.compile(r"zoo:([^:]+)|grown:(?:zoo:)?([^:]+):.*")  # a grown model has its original's texts


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the zoo.

    Attributes:
        name: without the prefix.
        description: one line.
        folder: where it lies, of a pretrained model its GGUF file; None if it has to be made or fetched first.
        bundled: whether it came with the package.
        record: its ``training.json``: how it was made, and how long that took; None where there is none.
        licence: of the weights.
        origin: who trained it, and where it comes from.
    """

    name: str
    description: str
    folder: Path | None
    bundled: bool
    record: dict[str, Any] | None
    licence: str = "Apache-2.0"
    origin: str = "trained for Foretoken"

    @property
    def how(self) -> str:
        """The command that fetches it, or makes one of its kind from generated tasks and ``base``."""
        if self.name in PRETRAINED:
            return f"foretoken zoo get {self.name}"
        return f"foretoken train base --recipe {self.name} --corpus generated"

    @property
    def size(self) -> int | None:
        """Bytes on disk, with the parts that lie next to it; None: it has to be made first."""
        if self.name in PRETRAINED:
            return PRETRAINED[self.name].size
        if self.folder is None:
            return None
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def home() -> Path:
    """The folder of the models that are not bundled: ``FORETOKEN_ZOO``, else in the user's data folder.

    Raises:
        ConfigError: ``FORETOKEN_ZOO`` names a file.
    """
    if named := os.environ.get(ENVIRONMENT):
        if Path(named).is_file():
            raise ConfigError(f"{ENVIRONMENT}={named}: this is a file; name the folder of the zoo's models")
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "foretoken" / "zoo"


def find(name: str) -> Model:
    """A model of the zoo, there or not, by ``NAME`` or ``zoo:NAME``.

    Raises:
        ConfigError: there is no such model; the message offers the nearest name.
    """
    short = name.removeprefix(PREFIX)
    if short in PRETRAINED:
        model = PRETRAINED[short]
        file = home() / short / model.file
        return Model(
            short, model.description, file if file.is_file() else None, False, None, model.licence, model.origin
        )
    if short not in MODELS:
        raise ConfigError(f"unknown zoo model '{short}': {nearest(short, (*MODELS, *PRETRAINED))}")
    for folder, bundled in ((_HERE / _FOLDERS.get(short, short), True), (home() / short, False)):
        if (folder / "config.json").exists():
            record = folder / "training.json"
            return Model(short, MODELS[short], folder, bundled, _read(record) if record.exists() else None)
    return Model(short, MODELS[short], None, False, None)


def drafts_for(draft: str, target: str) -> bool:
    """Whether a model of the zoo drafts for a target where no draft is named.

    Args:
        draft: with the prefix.
        target: any model's name, as typed.
    """
    named = _TARGET.fullmatch(target)
    return named is not None and (named[1] or named[2]) in _DRAFTS[draft]


def _read(record: Path) -> dict[str, Any]:
    """How a model was made.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        made = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{record}: cannot be read ({error}); make the model again, or remove its folder") from None
    if not isinstance(made, dict):
        raise ConfigError(f"{record}: holds no JSON object; make the model again, or remove its folder")
    return made


def path(name: str) -> Path:
    """The folder of a model, of a pretrained one its GGUF file, by ``NAME`` or ``zoo:NAME``.

    Raises:
        ConfigError: there is no such model, or it has to be made or fetched first; the message says how.
    """
    model = find(name)
    if model.folder is None and model.name in PRETRAINED:
        raise ConfigError(
            f"zoo model '{model.name}' is not here: fetch its {PRETRAINED[model.name].download / 1e6:.0f} MB "
            f"({model.licence}) with: {model.how}"
        )
    if model.folder is None:
        raise ConfigError(
            f"zoo model '{model.name}' is not here; a clone of the repository has most of them, or make one with: "
            f"{model.how} (the published ones were trained on public corpora: --data DIR in place of --corpus)"
        )
    return model.folder
