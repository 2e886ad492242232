"""The files of a datastore: a manifest, and segments of tokens with the order of their suffixes.

    DIR/
      datastore.json              the manifest: the vocabulary of the tokens, and the list of segments
      segment-000001.tokens       the documents, one after the other, the whole of it backwards
      segment-000001.suffixes     where each suffix of that begins, in the order of the suffixes

Backwards, because a lookup searches for the end of a text, which is a beginning of the reversed stream: one search
finds the longest context that occurs, and all shorter ones lie around it. Tokens are big-endian (2 bytes, or 4 for
vocabularies from 65,536 entries on), so that their order is the order of their bytes; suffixes are little-endian,
4 bytes. Between documents stands a separator, the first id beyond the vocabulary, which no text contains.

The manifest is replaced as a whole and last. Readers ignore unlisted files: a killed build or append
leaves the datastore unchanged.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.core.errors import InputError
from foretoken.core.files import check_format, write_whole
from foretoken.models.fingerprint import digest_of

MANIFEST = "datastore.json"
FORMAT, VERSION = "foretoken datastore", 1
SUFFIX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment.

    Attributes:
        name: of its files, without their endings.
        tokens: separators included.
        documents: how many there are in it.
        sha256: of its tokens' file, then of its suffixes' file.
    """

    name: str
    tokens: int
    documents: int
    sha256: tuple[str, str]

    def paths(self, folder: Path) -> tuple[Path, Path]:
        """The tokens' file and the suffixes'."""
        return folder / f"{self.name}.tokens", folder / f"{self.name}.suffixes"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A datastore as its manifest describes it.

    Attributes:
        vocab_size: V; ids are below it, and V itself is the separator.
        vocabulary: fingerprint of the tokenizer's vocabulary (models/fingerprint.py).
        model: name of the model that supplied the tokenizer.
        segments: oldest first.
        history: one entry for each command that wrote to it.
    """

    vocab_size: int
    vocabulary: str
    model: str
    segments: tuple[Segment, ...] = ()
    history: tuple[dict[str, Any], ...] = field(default=())

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return 2 if self.vocab_size < 1 << 16 else 4

    @property
    def tokens(self) -> int:
        """Of all segments, separators included."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def documents(self) -> int:
        """Of all segments."""
        return sum(segment.documents for segment in self.segments)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest, which commits the new content."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    write_whole(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a datastore, and check the length of its files.

    Raises:
        InputError: there is no datastore, it is of another format, or a file of it is missing or cut off.
    """
    from pydantic import TypeAdapter

    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder}: not a datastore (it has no {MANIFEST}); make one with: foretoken datastore build")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"of another format than '{FORMAT}'")
        check_format(content["version"], VERSION)
        manifest = TypeAdapter(Manifest).validate_python(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); if it is damaged, "
            "build the datastore again"
        ) from None
    for segment in manifest.segments:
        sizes = segment.tokens * manifest.token_bytes, segment.tokens * SUFFIX_BYTES
        for file, size in zip(segment.paths(folder), sizes, strict=True):
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise InputError(f"{file}: {what}; the datastore is damaged, build it again")
    return manifest


def damaged_files(folder: Path, manifest: Manifest) -> list[Path]:
    """The files with a changed content; reads all of them."""
    return [
        path
        for segment in manifest.segments
        for path, expected in zip(segment.paths(folder), segment.sha256, strict=True)
        if digest_of(path) != expected
    ]
