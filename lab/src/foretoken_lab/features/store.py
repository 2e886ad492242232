"""Features on disk: shards of whole sequences end to end, an index that describes them, and a reader that streams.

    FOLDER/index.json                 the target, its taps, the text, and the shards with their hashes
    FOLDER/shard-00000.safetensors    one row a token; N tokens of S sequences

A shard holds

    tokens_N           int32    the token ids
    positions_N        int32    place of each token in its sequence, from 0
    starts_S           int32    row at which each sequence begins
    hidden.<depth>_ND  stored   the residual stream after <depth> layers (0: what the first layer reads), or after the
                                final norm (hidden.final_ND: what the head reads)
    top_ids_NK         int32    the K most probable next tokens, most probable first
    top_logits_NK      model's  their logits, in the precision in which the model computes them
    logits_NV          stored   all logits
    logsumexp_N        float32  of all logits: exp(logit - logsumexp) is the target's probability at temperature 1

where *stored* is the index's ``dtype``. A file is written next to its place, then renamed; the index is written after
the shard that it names, so what an index names is whole.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foretoken.core.errors import ConfigError, InputError, MismatchError
from foretoken.core.files import write_whole
from foretoken.forward.hidden_states import FINAL, Depth
from foretoken.models.fingerprint import digest_of, fingerprint

All = Literal["all"]

INDEX = "index.json"
FORMAT = 1

_HIDDEN = re.compile(r"hidden\.(final|\d+)_ND")


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        sha256: of the file.
        text: SHA-256 of its tokens and starts: whether it is this text that is given again.
    """

    name: str
    sequences: int
    tokens: int
    bytes: int
    sha256: str
    text: str


@dataclass(frozen=True)
class Index:
    """What the shards of a folder hold.

    Attributes:
        target: fingerprint of the checkpoint.
        computed_in: dtype of the target's weights while it ran.
        layers: depths of the hidden states, ascending, "final" last.
        top_logits: logits kept per token, or "all".
        dtype: of the hidden states and of all logits.
        depth: layers of the target.
        width: D, of a hidden state.
        vocabulary: V.
        shard_tokens: a shard is closed with the sequence that would exceed this.
        data: how the text was made, as given; two runs on one folder must agree on it.
    """

    target: str
    computed_in: str
    layers: tuple[Depth, ...]
    top_logits: int | All
    dtype: str
    depth: int
    width: int
    vocabulary: int
    shard_tokens: int
    data: Mapping[str, Any]
    shards: tuple[Shard, ...] = ()

    @property
    def tokens(self) -> int:
        """Of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def sequences(self) -> int:
        """Of all shards."""
        return sum(shard.sequences for shard in self.shards)

    @property
    def shard_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def text(self) -> str:
        """As it is written."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Put it in place of the one before."""
        write_whole(folder / INDEX, self.text())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a folder.

        Raises:
            InputError: there is none, or it cannot be used.
        """
        path = folder / INDEX
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if (found := fields.pop("format")) != FORMAT:
                raise InputError(f"{path}: format {found}, but this version reads {FORMAT}; extract the features again")
            shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
            return cls(**{**fields, "layers": tuple(fields["layers"])}, shards=shards)
        except FileNotFoundError:
            raise InputError(
                f"{folder}: holds no features (no {INDEX}); make them with: foretoken train features --out {folder}"
            ) from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: damaged ({error}); remove the folder and extract the features again") from None


@dataclass(frozen=True)
class Features:
    """Whole sequences end to end with the target's hidden states: a shard, a batch or one sequence.

    Attributes:
        tokens_N: int64.
        positions_N: int64, from 0 in each sequence.
        starts_S: int64, the row at which each sequence begins.
        hidden: [N, D] of each depth.
        top_ids_NK: int64; None if not extracted, as are the others below.
        top_logits_NK: of the ``top_ids_NK``.
        logits_NV: all of them.
        logsumexp_N: float32.
    """

    tokens_N: Tensor
    positions_N: Tensor
    starts_S: Tensor
    hidden: Mapping[Depth, Tensor]
    top_ids_NK: Tensor | None = None
    top_logits_NK: Tensor | None = None
    logits_NV: Tensor | None = None
    logsumexp_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def top_log_p_NK(self) -> Tensor:
        """The target's log-probabilities of the kept tokens, float32; not renormalised over them."""
        if self.top_logits_NK is None or self.logsumexp_N is None:
            raise ConfigError("these features hold no top logits: extract them with --top-logits K")
        return self.top_logits_NK.float() - self.logsumexp_N[:, None]

    def spans(self) -> list[tuple[int, int]]:
        """First row and the row after the last, of each sequence."""
        starts = self.starts_S.tolist()
        return list(zip(starts, [*starts[1:], len(self)], strict=True))

    def part(self, first: int, last: int) -> Features:
        """The sequences from row ``first`` to before row ``last``, both of them bounds of sequences; not copied."""
        inside = self.starts_S[(self.starts_S >= first) & (self.starts_S < last)] - first
        return self._map(lambda rows: rows[first:last], inside)

    def gather(self, spans: list[tuple[int, int]]) -> Features:
        """The sequences of these spans, in this order; copied."""
        rows = torch.cat([torch.arange(first, last) for first, last in spans])
        lengths = torch.tensor([last - first for first, last in spans])
        return self._map(lambda values: values[rows], lengths.cumsum(0) - lengths)

    def _map(self, take: Any, starts_S: Tensor) -> Features:
        def maybe(values: Tensor | None) -> Tensor | None:
            return None if values is None else take(values)

        return Features(
            take(self.tokens_N),
            take(self.positions_N),
            starts_S,
            {depth: take(values) for depth, values in self.hidden.items()},
            maybe(self.top_ids_NK),
            maybe(self.top_logits_NK),
            maybe(self.logits_NV),
            maybe(self.logsumexp_N),
        )


class FeatureStore:
    """The features of a folder, read shard by shard: never more than two shards in memory, mapped from their files.

    A shard is held against its hash when it is first read. The second shard is there only while the caller keeps the
    last batch of the one before.

    Args:
        folder: as ``extract`` made it; shards that it is still adding are not seen.
    Raises:
        InputError: there is no index, or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = Index.read(folder)
        self._sound: set[str] = set()

    def __len__(self) -> int:
        """Tokens."""
        return self.index.tokens

    @property
    def width(self) -> int:
        """D, of a hidden state."""
        return self.index.width

    def check_target(self, folder: Path) -> None:
        """Refuse a target that these features were not taken from.

        Raises:
            MismatchError: its fingerprint is another.
            ModelError: it has no config or no weights.
        """
        if fingerprint(folder) != self.index.target:
            raise MismatchError(
                f"the features in {self.folder} were taken from another target than {folder} (its config or weights "
                "differ); use that target, or extract features of this one"
            )

    def batches(self, batch_tokens: int, shuffle_seed: int | None = None) -> Iterator[Features]:
        """One pass: whole sequences, as many as fit into ``batch_tokens``; a longer one is a batch of its own.

        A batch never crosses two shards, so the last one of a shard may be small.

        Args:
            shuffle_seed: shuffles the shards, and the sequences in each; None keeps the order of the text.
        Raises:
            InputError: a shard is missing or damaged; the message names it.
        """
        if batch_tokens < 1:
            raise ConfigError(f"batch_tokens={batch_tokens}: must be at least 1")
        shards = list(self.index.shards)
        rng = None if shuffle_seed is None else random.Random(shuffle_seed)
        if rng is not None:
            rng.shuffle(shards)
        for shard in shards:
            yield from _batches(self._load(shard), batch_tokens, rng)

    def sequences(self) -> Iterator[Features]:
        """Every sequence by itself, in the order of the text.

        Raises:
            InputError: as for ``batches``.
        """
        for shard in self.index.shards:
            features = self._load(shard)
            for first, last in features.spans():
                yield features.part(first, last)
            del features  # before the next one is loaded

    def shard(self, number: int) -> Features:
        """All sequences of one shard.

        Raises:
            InputError: it is missing or damaged.
        """
        return self._load(self.index.shards[number])

    def _load(self, shard: Shard) -> Features:
        path = self.folder / shard.name
        try:
            if shard.name not in self._sound:
                if digest_of(path) != shard.sha256:
                    raise InputError(f"{path}: damaged (its SHA-256 is not the index's); {_AGAIN}")
                self._sound.add(shard.name)
            tensors = load_file(path)
        except FileNotFoundError:
            raise InputError(f"{path}: missing; {_AGAIN}") from None
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot be read ({error}); {_AGAIN}") from None
        hidden: dict[Depth, Tensor] = {}
        for name in tensors:
            if found := _HIDDEN.fullmatch(name):
                hidden[FINAL if found[1] == FINAL else int(found[1])] = tensors[name]
        top_ids_NK = tensors.get("top_ids_NK")
        return Features(
            tensors["tokens_N"].long(),
            tensors["positions_N"].long(),
            tensors["starts_S"].long(),
            hidden,
            None if top_ids_NK is None else top_ids_NK.long(),
            tensors.get("top_logits_NK"),
            tensors.get("logits_NV"),
            tensors.get("logsumexp_N"),
        )


_AGAIN = "restore it, or remove the folder and extract the features again"


def _batches(features: Features, batch_tokens: int, rng: random.Random | None) -> Iterator[Features]:
    spans = features.spans()
    if rng is not None:
        rng.shuffle(spans)
    batch: list[tuple[int, int]] = []
    filled = 0
    for first, last in spans:
        if batch and filled + last - first > batch_tokens:
            yield _take(features, batch, rng)
            batch, filled = [], 0
        batch.append((first, last))
        filled += last - first
    if batch:
        yield _take(features, batch, rng)


def _take(features: Features, spans: list[tuple[int, int]], rng: random.Random | None) -> Features:
    return features.part(spans[0][0], spans[-1][1]) if rng is None else features.gather(spans)
