"""Where the text of a training comes from: files of the user, or what another distribution declares."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from foretoken.core import extensions
from foretoken.core.errors import ConfigError, InputError
from foretoken.data import documents as doc
from foretoken.data.folder import check_one_text, data_root
from foretoken.train.mixture import Source
from foretoken.train.trainer import StoredFeatures

GENERATED = "generated"  # tasks of the lab: the one name of a corpus that is no file


def mixture(name: str) -> Callable[[Path], list[Source]]:
    """A mixture of the public corpora, given their folder, by the name of its entry point.

    It is looked up when it is called: a run on files of the user needs none.
    """

    def read(root: Path) -> list[Source]:
        found = extensions.loaded(extensions.MIXTURES, name)
        if found is None:
            raise _no_mixture()
        return found(root)

    return read


def stored_features(folder: Path, depths: Sequence[int], seed: int, target: Path) -> StoredFeatures:
    """Open a folder of ``foretoken train features``, see :meth:`StoredFeatures.of`.

    Raises:
        ConfigError: foretoken-lab, which writes and reads such folders, is not installed.
    """
    store: type[StoredFeatures] = extensions.required(extensions.FEATURES, "store", "--features")
    return store.of(folder, depths, seed, target)


def chosen(data: Path | None, corpus: Sequence[str] | None, default: Callable[[Path], list[Source]]) -> list[Source]:
    """The user's files, or a mixture of the data folder.

    Args:
        data, corpus: the options of that name.
        default: the mixture, given the folder.
    Raises:
        ConfigError, InputError: a file, the folder or the mixture is missing, or both options are given.
    """
    check_one_text(data, corpus)
    if corpus:
        return parse_all(corpus)
    if not extensions.declared(extensions.MIXTURES):
        raise _no_mixture()
    return default(data_root(data))


def _no_mixture() -> ConfigError:
    return ConfigError(
        "name your own text with --corpus FILE: the mixtures of public corpora come with foretoken-lab; "
        f"{extensions.GET_LAB}"
    )


def from_files(name: str, share: float, files: list[Path]) -> Source:
    """Files of the user, or of a corpus, one after the other."""

    def documents() -> Iterator[str]:
        for path in files:
            yield from doc.documents(path)

    return Source(name, share, documents, tuple(files))


def parse_all(arguments: Sequence[str]) -> list[Source]:
    """A user's files; those of the same name in different folders get numbers.

    Raises:
        ConfigError: see ``parse``.
        InputError: likewise.
    """
    found = []
    names: Counter[str] = Counter()
    for source in map(parse, arguments):
        names[source.name] += 1
        number = names[source.name]
        found.append(source if number == 1 else replace(source, name=f"{source.name}_{number}"))
    return found


def parse(argument: str) -> Source:
    """A user's ``FILE`` or ``FILE=SHARE``, or the name of text that another distribution makes: ``generated``.

    Raises:
        ConfigError: the share is not a positive number, or the distribution that has the text is not installed.
        InputError: there is no such file, or its first record cannot be used.
    """
    name, _, share = argument.rpartition("=") if "=" in argument else (argument, "", "1")
    try:
        weight = float(share)
    except ValueError:
        weight = 0.0
    if not (weight > 0 and math.isfinite(weight)):
        raise ConfigError(f"--corpus {argument}: the share after '=' must be a positive number, not '{share}'")
    made = extensions.loaded(extensions.CORPORA, name)
    if made is not None:
        return made(weight)
    if name == GENERATED:
        raise ConfigError(
            f"--corpus {GENERATED}: the generated tasks come with foretoken-lab; {extensions.GET_LAB}; or name a file"
        )
    path = Path(name)
    if not path.is_file():
        raise InputError(f"--corpus {path}: {'this is a folder, not a file' if path.is_dir() else 'no such file'}")
    source = from_files(re.sub(r"\W+", "_", path.stem), weight, [path])
    if next(source.documents(), None) is None:  # before a model is loaded for it, and a folder made
        raise InputError(f"corpus '{source.name}' is empty: it holds no document to train on")
    return source
