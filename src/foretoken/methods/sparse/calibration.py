"""A target's statistics for sparse verification, measured once on text: one small JSON file.

    ffn         tau -> share of channels that are left out, of one row and of several together
    moe         per layer the medians beta_1 .. beta_{k-1} of the ratios of methods/sparse/feed_forward.py
    attention   layers that pick blocks for themselves (anchors), and how much neighbours agree

By default ``foretoken calibrate sparse`` writes it into the folder of the target's weights, where the engine finds it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from foretoken.core.errors import ConfigError, MismatchError, ModelError
from foretoken.core.files import check_format, home_expanded, write_whole
from foretoken.drafting.learned_part import check_fingerprint, folder_of
from foretoken.models.language_model import LanguageModel

FILE = "sparse.json"
FORMAT = 1
_Share = Annotated[float, Ge(0), Le(1)]
_Table = tuple[tuple[_Share, ...], ...]
_FORCED_ANCHORS = 2  # first layers that always pick for themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Shares omitted at one threshold, as means over layers and rows.

    Attributes:
        tau: the threshold.
        row: share of channels below it in a row.
        union: number of rows -> share of channels below it in all of so many consecutive rows.
        tiles: number of rows -> share of tiles (16 neighbouring channels) that lie wholly in that share: what the
            native decoder can skip of the up projection.
    """

    tau: float
    row: _Share
    union: Mapping[int, _Share]
    tiles: Mapping[int, _Share]

    def speedup(self, rows: int) -> float:
        """Of an MLP at best, by the weights it reads: gate whole, up by tiles, down by channels."""
        return 3.0 / (1.0 + (1.0 - self.tiles[rows]) + (1.0 - self.union[rows]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Medians of the ratios, for every layer with experts.

    Attributes:
        num_chosen: k.
        beta: layer -> beta_1 .. beta_{k-1}.
    """

    num_chosen: int
    beta: Mapping[int, tuple[Annotated[float, Ge(0)], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Which layers pick blocks.

    Attributes:
        layers: the anchors, increasing; the first two that may pick are among them.
        theta: mean Jaccard similarity below which a layer became an anchor.
        jaccard: [L][L], mean over heads and steps of the similarity of two layers' choices; 0 where one picks none.
        jaccard_of_layers: the same of the sets that all heads of a layer share; empty in older files.
        settings: of the selection that was observed (block, budget, ...), as VerificationConfig names them.
        caught: score -> share of the attention on free blocks (neither sinks nor locals) that its choice keeps, for
            the root that chose ("root"), and for the seven rows after it ("draft"); empty in older files.
    """

    layers: tuple[int, ...]
    theta: _Share
    jaccard: _Table
    jaccard_of_layers: _Table = ()
    settings: Mapping[str, Any]
    caught: Mapping[str, Mapping[str, _Share]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = self.layers
        if not layers or layers[0] < 0 or list(layers) != sorted(set(layers)):
            raise ValueError(f"anchors {list(layers)}")
        square = all(len(row) == len(table) for table in (self.jaccard, self.jaccard_of_layers) for row in table)
        if not square or len(self.jaccard) <= layers[-1]:
            raise ValueError("a table of similarities that is not square")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything that was measured of one target.

    Attributes:
        model, fingerprint: of the target; the file is invalid for other targets.
        num_tokens: of text that was read.
        ffn: by threshold; empty for a model without gated MLPs.
        moe: None for a model without routed experts.
        attention: None where no context was long enough.
        provenance: how it was made.
    """

    model: str
    fingerprint: str
    num_tokens: int
    ffn: tuple[Sparsity, ...] = ()
    moe: Thresholds | None = None
    attention: Anchors | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file whole, or not at all."""
        write_whole(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read a file.

        Raises:
            ModelError: there is none, or it is damaged.
        """
        from pydantic import TypeAdapter

        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            check_format(found["format"], FORMAT)
            return TypeAdapter(cls).validate_python(found)
        except FileNotFoundError:
            raise ModelError(f"{path}: there is no such calibration file") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{path}: the calibration cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); "
                "measure it with 'foretoken calibrate sparse'"
            ) from None

    def thresholds(self, layers: Sequence[int], num_chosen: int) -> Mapping[int, Sequence[float]]:
        """The experts' ratio maps, known to fit.

        Raises:
            ConfigError: the file has none.
            MismatchError: they are of other layers, or of another number of experts a row.
        """
        if self.moe is None:
            raise ConfigError(f"the calibration of '{self.model}' has no thresholds for experts: {_remedy(self.model)}")
        fits = set(self.moe.beta) >= set(layers) and all(
            len(self.moe.beta[layer]) == num_chosen - 1 for layer in layers
        )
        if not fits or self.moe.num_chosen != num_chosen:
            raise MismatchError(
                f"the calibration's thresholds are for {self.moe.num_chosen} experts a row in layers "
                f"{sorted(self.moe.beta)}, the model has {num_chosen} in {list(layers)}: {_remedy(self.model)}"
            )
        return self.moe.beta

    def anchors_for(self, num_layers: int, sets: str = "per_head", theta: float | None = None) -> Sequence[int]:
        """The layers that pick blocks, known to fit.

        Args:
            sets: the owner of the sets that are handed on; "per_layer" has another similarity.
            theta: similarity below which a layer picks for itself; None: the one that the file was made with.
        Raises:
            ConfigError: the file has none, or none for such sets.
            MismatchError: they are of a deeper model.
        """
        if self.attention is None:
            raise ConfigError(
                f"the calibration of '{self.model}' has no anchor layers, because no text was long enough for its "
                f"blocks: {_remedy(self.model)} with longer documents, or a larger --block"
            )
        if self.attention.layers[-1] >= num_layers:
            raise MismatchError(
                f"the calibration's anchors are layers {list(self.attention.layers)}, the model has {num_layers}: "
                f"{_remedy(self.model)}"
            )
        if sets != "per_layer":
            return self.attention.layers if theta is None else sweep(self.attention.jaccard, theta)
        if not self.attention.jaccard_of_layers:
            raise ConfigError(
                f"the calibration of '{self.model}' is older than attention=per_layer and does not say how alike the "
                f"layers' sets are: {_remedy(self.model)}"
            )
        return sweep(self.attention.jaccard_of_layers, self.attention.theta if theta is None else theta)


def sweep(jaccard: Sequence[Sequence[float]], theta: float) -> list[int]:
    """The anchors: from the first layer upwards, a layer that is unlike the current anchor becomes the next.

    Args:
        jaccard: [L][L]; a layer that picks nothing is not even like itself.
        theta: similarity below which two layers are unlike.
    """
    found: list[int] = []
    for number, layer in enumerate(layer for layer, row in enumerate(jaccard) if row[layer] > 0.0):
        if number < _FORCED_ANCHORS or jaccard[found[-1]][layer] < theta:
            found.append(layer)
    return found


def default_path(target: LanguageModel) -> Path:
    """Return the default place of a target's calibration: the folder of its weights."""
    return folder_of(target.source) / FILE


def find(target: LanguageModel, path: str | Path | None) -> Calibration | None:
    """Return a target's calibration: the named file, else the one in the folder of its weights; None if there is none.

    Raises:
        ModelError: the file named is missing, or a file is damaged.
        MismatchError: it was made for another model.
    """
    place = default_path(target) if path is None else home_expanded(path)
    if path is None and not place.is_file():
        return None
    found = Calibration.load(place)
    check_fingerprint(f"{place} was made for", found.model, found.fingerprint, target, _remedy(target.name))
    return found


def needed(target: LanguageModel, path: str | Path | None, what: str) -> Calibration:
    """As :func:`find`, where a setting cannot do without.

    Raises:
        ConfigError: there is none; names the setting and the remedy.
    """
    found = find(target, path)
    if found is None:
        raise ConfigError(
            f"{what} needs a calibration of '{target.name}', and none lies next to its weights: {_remedy(target.name)}"
        )
    return found


def _remedy(model: str) -> str:
    return f"make one with 'foretoken calibrate sparse --model {model} --corpus FILE'"
