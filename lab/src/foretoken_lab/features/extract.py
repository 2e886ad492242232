"""Features of a target over text, on disk: what heads and adapters are trained from.

``extract`` runs the target once over every sequence (taps.py) and writes shards (store.py). It
promises that

* values are those of the library's own forward, in the dtype in which the target's weights are loaded;
* one shard and one forward are in memory, however long the text is;
* a run that is killed at any moment goes on after its last whole shard when the same call is made again, and its shards
  are the same bytes then: no forward takes sequences of two shards;
* shards and index never take more than ``max_bytes``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foretoken.core.errors import ConfigError, ForetokenError, InputError
from foretoken.models.fingerprint import digest_of
from foretoken.train.stopping import Interrupted
from foretoken_lab.features.store import INDEX, Index, Shard
from foretoken_lab.features.taps import Rows, Taps, Wanted

SHARD_BYTES = 1 << 26  # of a shard, unless its tokens are given
SHARD_TOKENS = 1 << 16  # of it at most, so that little is lost when a run is killed
FORWARD_TOKENS = 2048  # of one forward; a longer sequence is a forward of its own
FORWARD_LOGITS = 1 << 26  # of one forward, if logits are wanted: 0.25 GB in float32
ENTRY_BYTES = 512  # bound on a shard's entry in the index
HEADER_BYTES = 256  # bound on what safetensors writes about one tensor, and about the file


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        tokens: extracted, those of earlier runs included.
        new: of them, extracted by this run.
        seconds: of this run.
        token_bytes: of one token.
        fits: about the number of tokens that the bound allows; None without a bound.
    """

    tokens: int
    new: int
    seconds: float
    token_bytes: int
    fits: int | None


@dataclass(frozen=True)
class Summary:
    """What a folder holds when a run ends.

    Attributes:
        bytes: of shards and index.
        full: the run stopped because the next sequence would exceed ``max_bytes``.
        new: tokens that this run added.
        seconds: that it took.
    """

    tokens: int
    sequences: int
    shards: int
    bytes: int
    full: bool
    new: int
    seconds: float


Report = Callable[[Progress], None]


def extract(
    model: Any,
    blocks: Iterable[Tensor | Sequence[int]],
    folder: Path,
    wanted: Wanted,
    *,
    target: str,
    data: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
    shard_tokens: int | None = None,
    report: Report = lambda progress: None,
) -> Summary:
    """Extract features, or go on where an earlier run into the same folder ended.

    Args:
        model: a causal language model of transformers, on its device.
        blocks: sequences of token ids: [B, T] (a row each) or [T], of any lengths; the first one first each time.
            Neighbours of one length share a forward; nothing is padded.
        folder: to make, or with the index of an earlier run.
        target: fingerprint of the model's checkpoint.
        data: how the text is made, as JSON. Going on needs the same; that the text is the same is checked as well.
        max_bytes: bound on shards and index together, at every moment.
        shard_tokens: close a shard before it exceeds this; None: what makes about 64 MB.
        report: called at the start and after each forward.
    Raises:
        ConfigError: an option does not fit the target, or not one sequence fits the bound.
        InputError: a sequence is empty, too long, or has ids that the target lacks.
        UnsupportedArchitecture: the target's parts cannot be found.
        ForetokenError: the folder holds something else, or the disk is full; whole shards are kept.
    """
    training = model.training
    model.eval()
    try:
        taps = Taps(model, wanted)
        row_bytes = 8 + sum(values[0].numel() * values.element_size() for values in taps.sample.values())
        index = Index(
            target=target,
            computed_in=str(next(model.parameters()).dtype).removeprefix("torch."),
            layers=taps.wanted.layers,
            top_logits=taps.wanted.top_logits,
            dtype=taps.wanted.dtype,
            depth=taps.depth,
            width=taps.width,
            vocabulary=taps.vocabulary,
            shard_tokens=shard_tokens or max(1, min(SHARD_TOKENS, SHARD_BYTES // row_bytes)),
            data=json.loads(json.dumps(data or {})),
        )
        run = _Run(taps, folder, index, row_bytes, max_bytes, report)
        return run.follow(_sequences(blocks, taps.vocabulary, longest(model)))
    finally:
        model.train(training)


class _Run:
    """One call of ``extract``: the index as it grows, and what bounds it."""

    def __init__(
        self, taps: Taps, folder: Path, index: Index, row_bytes: int, max_bytes: int | None, report: Report
    ) -> None:
        self._taps, self._folder, self._row_bytes, self._max_bytes = taps, folder, row_bytes, max_bytes
        self._report_to = report
        self._index = _claim(folder, index)
        self._before = self._index.tokens
        self._started = time.monotonic()

    def follow(self, sequences: Iterator[Tensor]) -> Summary:
        """Write shard after shard, until the text ends or the bound is reached."""
        self._report(0)
        try:
            self._skip(sequences)
            pending = next(sequences, None)
            while pending is not None:
                shard, pending = self._gather(pending, sequences)
                if not shard:
                    break  # pending does not fit any more
                tensors = self._compute(shard)
                self._index = _write_shard(self._folder, self._index, tensors, _digest(shard))
        except OSError as error:  # reading the text, which may keep files of its own
            raise ForetokenError(_explain(self._folder, len(self._index.shards), error)) from None
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped with {self._index.tokens} tokens in {len(self._index.shards)} shards; give the same command "
                "to go on"
            ) from None
        if pending is not None and not self._index.shards:
            raise ConfigError(
                f"max_bytes={self._max_bytes} (--max-gb): not one sequence fits: {len(pending)} tokens take "
                f"{self._bytes_with(len(pending), 1)} bytes"
            )
        return Summary(
            self._index.tokens,
            self._index.sequences,
            len(self._index.shards),
            self._index.shard_bytes + (self._folder / INDEX).stat().st_size,
            pending is not None,
            self._index.tokens - self._before,
            time.monotonic() - self._started,
        )

    def _skip(self, sequences: Iterator[Tensor]) -> None:
        """Skip the sequences of finished shards, and check that the text is the same."""
        for shard in self._index.shards:
            if _digest(islice(sequences, shard.sequences)) != shard.text:
                raise ForetokenError(
                    f"{self._folder}: {shard.name} was extracted from another text than is given now (its files or "
                    "their order changed); name another folder, or remove that one"
                )

    def _gather(self, pending: Tensor, sequences: Iterator[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """The sequences of the next shard, and the one after them if there is one."""
        shard: list[Tensor] = []
        tokens = 0
        following: Tensor | None = pending
        while following is not None:
            tokens += len(following)
            if shard and tokens > self._index.shard_tokens:
                break
            if self._max_bytes is not None and self._bytes_with(tokens, len(shard) + 1) > self._max_bytes:
                break
            shard.append(following)
            following = next(sequences, None)
        return shard, following

    def _bytes_with(self, tokens: int, sequences: int) -> int:
        """Bytes in the folder, at most, while a shard of this size is added: the index is there twice for a moment."""
        index = 2 * (len(self._index.text()) + ENTRY_BYTES)
        shard = _size_bound(self._row_bytes, len(self._taps.sample) + 3, tokens, sequences)
        return self._index.shard_bytes + shard + index

    def _compute(self, shard: list[Tensor]) -> Rows:
        """All tensors of a shard."""
        lengths = torch.tensor([len(sequence) for sequence in shard])
        tensors: Rows = {
            "tokens_N": torch.cat(shard),
            "positions_N": torch.cat([torch.arange(len(sequence), dtype=torch.int32) for sequence in shard]),
            "starts_S": (lengths.cumsum(0) - lengths).int(),
        }
        limit = FORWARD_TOKENS
        if self._taps.wanted.top_logits != 0:
            limit = min(limit, FORWARD_LOGITS // self._taps.vocabulary)
        done = 0
        for tokens_BT in _groups(shard, limit):
            rows = self._taps(tokens_BT.long())
            for name, values in rows.items():
                if name not in tensors:
                    tensors[name] = values.new_empty(int(lengths.sum()), *values.shape[1:])
                tensors[name][done : done + len(values)] = values
            done += tokens_BT.numel()
            self._report(done)
        return tensors

    def _report(self, done: int) -> None:
        tokens = self._index.tokens + done
        fits = None
        if self._max_bytes is not None:
            room = self._max_bytes - self._bytes_with(0, 0)
            fits = self._index.tokens + max(0, room // self._row_bytes)
        seconds = time.monotonic() - self._started
        self._report_to(Progress(tokens, tokens - self._before, seconds, self._row_bytes, fits))


def _claim(folder: Path, index: Index) -> Index:
    """The index to go on from: the folder's own if it is of the same run, else this one, written.

    Raises:
        ConfigError: the folder cannot be made.
        ForetokenError: the folder holds something else; the message names the difference.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror or error})") from None
    if not (folder / INDEX).exists():
        if stray := sorted(folder.glob("shard-*.safetensors")):
            raise ForetokenError(f"{folder}: holds {stray[0].name} but no {INDEX}; name another folder")
        index.write(folder)
        return index
    found = Index.read(folder)
    if differences := _differences(found, index):
        raise ForetokenError(
            f"{folder}: holds features of another run ({'; '.join(differences)}); name another folder, or remove that "
            "one"
        )
    for shard in found.shards:
        path = folder / shard.name
        if not path.is_file() or path.stat().st_size != shard.bytes:
            raise ForetokenError(f"{path}: missing or cut short; restore it, or remove the folder and start again")
    named = {shard.name for shard in found.shards}
    for pattern in ("shard-*.safetensors", "shard-*.part"):  # what a killed run left
        for path in folder.glob(pattern):
            if path.name not in named:
                path.unlink()
    return found


_OPTIONS = {  # of the command line, where an index says it otherwise
    "layers": " (--depths)",
    "top_logits": " (--top-logits)",
    "dtype": " (--state-dtype)",
    "data.block": " (--block)",
    "data.seed": " (--seed)",
    "data.sources": " (--corpus, --data)",
}


def _differences(found: Index, index: Index) -> list[str]:
    follow = ("depth", "width", "vocabulary")  # from the target
    pairs: dict[str, tuple[Any, Any]] = {
        field.name: (getattr(found, field.name), getattr(index, field.name))
        for field in fields(Index)
        if field.name not in ("data", "shards", *follow)
    }
    for key in sorted({*found.data, *index.data}):
        pairs[f"data.{key}"] = (found.data.get(key), index.data.get(key))
    return [
        f"{name}{_OPTIONS.get(name, '')}: {_short(there)} there, {_short(here)} now"
        for name, (there, here) in pairs.items()
        if there != here
    ]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _sequences(blocks: Iterable[Tensor | Sequence[int]], vocabulary: int, longest: int | None) -> Iterator[Tensor]:
    """Every sequence by itself, int32 [T] on the CPU, checked."""
    number = 0
    for block in blocks:
        rows = torch.as_tensor(block).to("cpu", torch.int32)
        for row in rows if rows.dim() == 2 else rows[None]:
            if len(row) == 0:
                raise InputError(f"sequence {number} is empty")
            if longest is not None and len(row) > longest:
                raise InputError(f"sequence {number} has {len(row)} tokens, but the target takes at most {longest}")
            low, high = int(row.min()), int(row.max())
            if low < 0 or high >= vocabulary:
                odd = low if low < 0 else high
                raise InputError(f"sequence {number} has the token {odd}, but the target's are 0 to {vocabulary - 1}")
            yield row
            number += 1


def _groups(sequences: list[Tensor], limit: int) -> Iterator[Tensor]:
    """Neighbours of one length, stacked [B, T] with B * T <= limit (or B = 1)."""
    group: list[Tensor] = []
    for sequence in sequences:
        if group and (len(sequence) != len(group[0]) or (len(group) + 1) * len(sequence) > limit):
            yield torch.stack(group)
            group = []
        group.append(sequence)
    if group:
        yield torch.stack(group)


def _digest(sequences: Iterable[Tensor]) -> str:
    """SHA-256 over lengths and tokens."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(sequence.numpy().astype("<i4").tobytes())
    return digest.hexdigest()


def longest(model: Any) -> int | None:
    """Positions that the target has; None for one that counts none."""
    text = model.config.get_text_config(decoder=True)
    found = getattr(text, "max_position_embeddings", None)
    return int(found) if found else None


def _write_shard(folder: Path, index: Index, tensors: Mapping[str, Tensor], text: str) -> Index:
    """Write the next shard, then the index that names it.

    Args:
        tensors: under the names of a shard.
        text: digest of the sequences.
    Returns:
        the new index.
    Raises:
        ForetokenError: the disk is full, say; the shards before it are kept.
    """
    place = folder / f"shard-{len(index.shards):05d}.safetensors"
    part = place.with_suffix(".part")
    try:
        save_file(dict(tensors), part)
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)  # the library writes files that only their owner can read
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        shard = Shard(
            place.name, len(tensors["starts_S"]), len(tensors["tokens_N"]), part.stat().st_size, digest_of(part), text
        )
        os.replace(part, place)
        index = replace(index, shards=(*index.shards, shard))
        index.write(folder)
    except (OSError, SafetensorError, ForetokenError) as error:
        part.unlink(missing_ok=True)
        raise ForetokenError(_explain(folder, len(index.shards), error)) from None
    return index


def _explain(folder: Path, kept: int, error: Exception) -> str:
    """Why writing stopped, which shards are kept, and the remedy."""
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    why = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
    return (
        f"{folder}: features cannot be written ({why}); the shards before it, {kept}, are kept and can be read; "
        "free space and run the same command to go on"
    )


def _size_bound(row_bytes: int, tensors: int, tokens: int, sequences: int) -> int:
    """Bytes that a shard takes at most: rows, starts, and what safetensors writes about them."""
    return tokens * row_bytes + sequences * 4 + (tensors + 1) * HEADER_BYTES
