"""Learned parts: modules trained for one model, found, checked and saved by one mechanism for all methods.

A folder of one part lies anywhere, or next to the weights of the model that it was trained for, under the name of its
algorithm. It has the layout of the speculators format:

    config.json        {"architectures": ["JudgeHead"], "speculators_model_type": "judge",
                        "speculators_config": {"algorithm": "judge",
                                               "verifier": {"name_or_path": "zoo:base", "fingerprint": "4792..."},
                                               "draft": {"name_or_path": ..., "fingerprint": ...}},
                        "width": 384, "normed": true, "threshold": 0.9, "foretoken_format": 1}
    model.safetensors  the weights; of a large part that was made elsewhere perhaps several files and an index

``draft`` is there if the part was trained for a pair of models; after it come the fields of the part's own config.
Differs from the speculators format: a fingerprint (models/fingerprint.py) says which weights the part belongs to.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from torch import Tensor

from foretoken.core.errors import ConfigError, MismatchError, ModelError
from foretoken.core.files import check_format, home_expanded, write_whole
from foretoken.drafting.published.folder import opened
from foretoken.models.fingerprint import fingerprint, fingerprint_of
from foretoken.models.gguf.magic import is_gguf
from foretoken.models.language_model import LanguageModel
from foretoken.models.made import Origin, origin_of
from foretoken.options.option import Option

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT, FORMAT_KEY = 1, "foretoken_format"

Part = TypeVar("Part", bound="LearnedPart")


@dataclass(frozen=True, kw_only=True)
class LearnedConfig:
    """The target of a learned part; subclasses add its description.

    Attributes:
        target: name of the target when the part was trained.
        target_fingerprint: of that target's weights; the part is of no use to others.
        draft, draft_fingerprint: the same of the draft model, for a part that belongs to a pair.
    """

    target: str
    target_fingerprint: str
    draft: str | None = None
    draft_fingerprint: str | None = None

    from_zero: ClassVar[tuple[str, ...]] = ()  # numbers that may be 0; all others are above it

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for each in fields(self):
            fits, value = _FITS.get(kinds[each.name]), getattr(self, each.name)
            if fits is not None and not fits(value, 0 if each.name in self.from_zero else sys.float_info.min):
                raise ValueError(f"{each.name}={value!r}")


_FITS: Mapping[Any, Callable[[Any, float], bool]] = {  # by annotation: a value, and the least number
    str: lambda value, least: isinstance(value, str),
    str | None: lambda value, least: isinstance(value, str | None),
    bool: lambda value, least: type(value) is bool,
    int: lambda value, least: type(value) is int and value >= least,
    float: lambda value, least: type(value) in (int, float) and least <= value <= sys.float_info.max,
}


FOLDER = Option("A folder of `foretoken train`; None: the one next to the target's weights.")
"""Of drafters that have learned something."""

_OWNERS = frozenset(each.name for each in fields(LearnedConfig))


class LearnedPart(ABC):
    """A module that a method trained for a model; a subclass defines its tensors.

    Attributes:
        algorithm: name of the method; also the name of its folder next to a model's weights.
        model_types: allowed values of ``speculators_model_type``; empty: the algorithm.
        title: its name in messages, as in "no TITLE for 'zoo:base'".
        option: the option of its method that names its folder.
        flag: how it is named on the command line, for messages.
        Config: a frozen dataclass of the fields of its ``config.json``.
        shelf: a pattern of folder names, where a folder may hold several parts in folders of their own.
        config: of this part.
    """

    algorithm: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]] = ()
    title: ClassVar[str]
    option: ClassVar[str] = "head"
    flag: ClassVar[str] = "--draft-model DIR"
    Config: ClassVar[type[LearnedConfig]]
    shelf: ClassVar[str | None] = None
    config: Any

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The weights as they are saved."""

    @classmethod
    @abstractmethod
    def of(cls: type[Part], config: Any, tensors: Mapping[str, Tensor]) -> Part:
        """The part that a config and saved weights describe.

        Raises:
            ValueError, KeyError, RuntimeError: they do not fit each other.
        """

    @classmethod
    def how(cls, target: str, draft: str, config: Any = None) -> str:
        """The command that trains one, for messages; empty where there is none.

        Args:
            target, draft: names of models.
            config: of the part that does not fit, if there is one.
        """
        return f"foretoken train {cls.algorithm} --target {target} --out DIR"

    @abstractmethod
    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a part that cannot work on the states of a model.

        Raises:
            MismatchError: it reads states of another shape.
        """

    def check_target(self, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        """Refuse a part of another target, or of another draft where a draft is given.

        Raises:
            MismatchError: it was trained for other weights, or reads states of another shape.
        """
        names = target.name, "DRAFT" if draft is None else draft.name
        remedy = _remedy(self.how(*names, self.config))
        trained = f"the {self.title} was trained for the"
        check_fingerprint(f"{trained} target", self.config.target, self.config.target_fingerprint, target, remedy)
        if draft is not None:
            check_fingerprint(f"{trained} draft", self.config.draft, self.config.draft_fingerprint, draft, remedy)
        self.check_shape(target if draft is None else draft)

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; each replaces a whole file or none.

        Raises:
            ConfigError: another model lies in the folder.
            ForetokenError: a file cannot be written.
        """
        from safetensors.torch import save

        self.check_place(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.tensors().items()}
        write_whole(folder / WEIGHTS, save(weights))
        write_whole(folder / CONFIG, json.dumps(self._settings() | {FORMAT_KEY: FORMAT}, indent=1) + "\n")

    @classmethod
    def load(cls: type[Part], folder: Path) -> Part:
        """Read a saved part.

        Raises:
            ModelError: there is none, it is of another kind, or it is damaged.
        """
        from safetensors import SafetensorError

        if folder.is_file() and not is_gguf(folder):
            raise ModelError(f"{folder}: this is a file, not the folder of a trained part ({cls.title})")
        try:
            settings, tensors = opened(folder)
            try:
                settings, tensors = cls._own_layout(settings, tensors)
            except ModelError as error:
                raise ModelError(f"{folder}: {error}") from None
            config = cls.Config(**cls._fields(settings))
            for name, values in tensors.items():
                if values.is_floating_point() and not bool(values.isfinite().all()):
                    raise ValueError(f"'{name}' holds NaN or infinite values")
            return cls.of(config, tensors)
        except FileNotFoundError:
            raise ModelError(f"{folder}: has no {cls.title} ({CONFIG} and {WEIGHTS})") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
            raise ModelError(
                f"{folder}: the {cls.title} cannot be read ({reason}): copy it again, or train it again"
            ) from None

    @classmethod
    def lies_in(cls, folder: Path) -> bool:
        """Whether there is such a part, whole or damaged, or something in its place."""
        return (folder / CONFIG).is_file() or (folder.is_file() and is_gguf(folder))

    @classmethod
    def check_place(cls, folder: Path) -> None:
        """Refuse a folder that a part would spoil, before anything is trained.

        Raises:
            ConfigError: it is a file, or another model lies in it.
        """
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder}: this is a file; name a folder to make")
        present = (folder / CONFIG).is_file() or (folder / WEIGHTS).is_file()
        if present and not cls._is_ours(folder / CONFIG):
            raise ConfigError(f"--out {folder}: another model lies there; name a folder to make")

    def _settings(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        config = self.config
        owners = {"verifier": {"name_or_path": config.target, "fingerprint": config.target_fingerprint}}
        if config.draft is not None:
            owners["draft"] = {"name_or_path": config.draft, "fingerprint": config.draft_fingerprint}
        return {
            "architectures": [type(self).__name__],
            "speculators_model_type": self.algorithm,
            "speculators_config": {"algorithm": self.algorithm, **owners},
            **{each.name: getattr(config, each.name) for each in fields(config) if each.name not in _OWNERS},
        }

    @classmethod
    def _fields(cls, settings: Any) -> dict[str, Any]:
        """The config's fields from the content of ``config.json``."""
        if not isinstance(settings, dict) or settings.get("speculators_model_type") != cls.algorithm:
            raise ValueError(f"{CONFIG} is not of a {cls.title}: it has no speculators_model_type '{cls.algorithm}'")
        check_format(settings.get(FORMAT_KEY, 1), FORMAT)
        owners = settings["speculators_config"]
        if not isinstance(owners, dict):
            raise ValueError(f"speculators_config={owners!r:.60}: an object")
        for role in ("verifier", *(["draft"] if "draft" in owners else [])):
            owner = owners.get(role)
            if not isinstance(owner, dict) or not {"name_or_path", "fingerprint"} <= owner.keys():
                raise ValueError(
                    f"speculators_config.{role}={owner!r:.60}: an object with name_or_path and fingerprint"
                )
        stated = [each for each in fields(cls.Config) if each.name not in _OWNERS]
        # a field that may be None is newer than some folders
        found = {each.name: settings.get(each.name) if each.default is None else settings[each.name] for each in stated}
        for name, role in (("target", "verifier"), ("draft", "draft")):
            if role == "verifier" or role in owners:
                found |= {name: owners[role]["name_or_path"], f"{name}_fingerprint": owners[role]["fingerprint"]}
        return found

    @classmethod
    def _own_layout(cls, settings: Any, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Config and tensors as this part saves them; a part that other makers publish reads their layouts, too.

        Raises:
            ValueError, ModelError: the layout is unknown, or config and tensors contradict each other.
        """
        return settings, tensors

    @classmethod
    def _is_ours(cls, path: Path) -> bool:
        """Whether a config says that it is of such a part."""
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        known = cls.model_types or (cls.algorithm,)
        return isinstance(settings, dict) and settings.get("speculators_model_type") in known


def find(kind: type[Part], given: str | Path | None, target: LanguageModel, draft: LanguageModel | None = None) -> Part:
    """Load the requested learned part, or the one next to a model's weights; check that it fits.

    Args:
        kind: which part.
        given: a folder, from the user; None or empty: ``kind.algorithm`` next to the weights.
        target: the model that the part was trained for.
        draft: the draft model, for a part that belongs to a pair; the part lies next to the draft's weights then.
    Raises:
        ConfigError: the folder begins with a home folder that does not exist.
        ModelError: there is no such part, it is of another kind, or it is damaged; the message says how to make one.
        MismatchError: it was trained for other models.
    """
    return find_all(kind, given, target, draft)[0]


def find_all(
    kind: type[Part], given: str | Path | None, target: LanguageModel, draft: LanguageModel | None = None
) -> list[Part]:
    """As :func:`find`, for a folder that may hold several parts (``kind.shelf``): all of them, at least one."""
    folders, origin = _located(kind, given, target, draft)
    parts = [kind.load(folder) for folder in folders]
    if origin is not None:
        theirs = fingerprint(origin.folder)
        parts = [origin.grown(part, target) if part.config.target_fingerprint == theirs else part for part in parts]
    for part in parts:
        part.check_target(target, draft)
    return parts


def check_present(kind: type[LearnedPart], given: str | Path | None, target: Any) -> None:
    """Refuse a part that :func:`find` would not find, or that says itself that it is another target's.

    Args:
        target: with ``name``, ``source`` and ``config``; its weights need not be loaded.
    Raises:
        ConfigError, ModelError, MismatchError: as :func:`find`.
        OSError, ValueError, TypeError, KeyError: a part's config cannot be read.
    """
    folders, origin = _located(kind, given, target, None)
    if origin is not None or kind.check_target is not LearnedPart.check_target:
        return
    for folder in folders:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config = kind.Config(**kind._fields(settings))
        remedy = _remedy(kind.how(target.name, "DRAFT", config))
        made = f"the {kind.title} was trained for the target"
        check_fingerprint(made, config.target, config.target_fingerprint, target, remedy)


def _located(
    kind: type[LearnedPart], given: str | Path | None, target: Any, draft: Any
) -> tuple[list[Path], Origin | None]:
    """The folders of the requested parts, and the original of the target if it was grown and the parts may grow."""
    owner = target if draft is None else draft
    try:
        place = home_expanded(given) if given else folder_of(owner.source) / kind.algorithm
    except RuntimeError:
        raise ConfigError(f"{kind.option}={given!r}: there is no such home folder") from None
    origin = origin_of(target.name, target.config)
    if origin is not None and not origin.grows(kind):
        origin = None
    if origin is not None and draft is None and not given and not _any_in(place, kind):
        place = origin.folder / kind.algorithm
    folders = _any_in(place, kind)
    if not folders:
        how = kind.how(target.name, "DRAFT" if draft is None else draft.name)
        if given or (
            place.parent.is_dir() and place.parent == folder_of(owner.source)
        ):  # made there, it is found there
            how = how.replace("--out DIR", f"--out {place}")
        remedy = f"make one with '{how}', or name" if how else "name"
        raise ModelError(f"no {kind.title} for '{owner.name}' in {place}: {remedy} one with {kind.flag}")
    return folders, origin


def _remedy(how: str) -> str:
    """What to do without a fitting part, given the command that trains one."""
    return f"train one with '{how}'" if how else "name the folder of one that was made for it"


def folder_of(source: str) -> Path:
    """Where a model's learned parts lie: its folder, or that of its one file."""
    place = Path(source)
    return place.parent if place.is_file() else place


def lies_beside(kind: type[LearnedPart], source: str) -> bool:
    """Whether a part of a kind lies next to a model's weights; nothing of it is read but names."""
    return bool(_any_in(folder_of(source) / kind.algorithm, kind))


def _any_in(place: Path, kind: type[LearnedPart]) -> list[Path]:
    """The folders of the parts that lie there: this one, or those on its shelf."""
    if kind.lies_in(place):
        return [place]
    return sorted(place.glob(kind.shelf)) if kind.shelf else []


def check_fingerprint(made: str, name: str | None, fingerprint: str | None, model: LanguageModel, remedy: str) -> None:
    """Refuse a part that was made for other weights than the model's.

    Args:
        made: the beginning of the message, as in "the judge was trained for the target".
        name, fingerprint: of the model that it was made for.
        remedy: the end of the message.
    Raises:
        MismatchError: the fingerprints differ.
    """
    if fingerprint != fingerprint_of(model.source):
        known = "no fingerprint" if fingerprint is None else f"fingerprint {fingerprint[:12]}"
        raise MismatchError(f"{made} '{name}' ({known}), not for '{model.name}' as it is now: {remedy}")
