"""A trigram model over token ids: interpolated Kneser-Ney, in one file; a probability takes a few lookups.

    p(w | u, v)  =  max(c(uvw) - D3, 0) / c(uv.)        +  D3 N(uv.) / c(uv.)      p(w | v)
    p(w | v)     =  max(N(.vw) - D2, 0) / N(.v.)        +  D2 N(v.) / N(.v.)       p(w)
    p(w)         =  max(N(.w) - D1, 0) / N(..)          +  D1 N1+ / N(..)          1 / V

c counts, N counts different neighbours. D = n1 / (n1 + 2 n2) of its order, where n1 and n2 are the numbers of entries
counted once and twice. An unseen context uses the order below unchanged. Every row sums to 1.

Papers: Kneser and Ney 1995; Chen and Goodman 1998, section 2.7. DiffuSpec, arXiv:2510.02358, uses KenLM over words.

Letters: V vocabulary, N entries, C contexts.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.core.files import write_whole
from foretoken.methods.diffuspec.native.paths import Entries, NativeGrams

FILE = "trigram.safetensors"
_KEPT = 1 << 14  # size of the cache of looked-up contexts


class Trigram:
    """The interpolated trigram model.

    Args:
        single: float32 [V]: p(w).
        pairs, triples: bigrams and trigrams.
    """

    def __init__(self, single: np.ndarray, pairs: Entries, triples: Entries) -> None:
        self._single, self._pairs, self._triples = single, pairs, triples
        self._singles: list[float] = single.tolist()
        self._looked_up: dict[tuple[int, int], tuple[dict[int, float], float]] = {}

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self._single)

    @classmethod
    def fit(cls, texts: Iterable[Sequence[int]], vocab_size: int, *, least: int = 1) -> "Trigram":
        """Count texts, and return the model.

        Args:
            texts: token ids.
            vocab_size: V.
            least: omit triples with fewer occurrences; their mass goes to the order below.
        Raises:
            ValueError: no text has three tokens.
        """
        parts = [np.asarray(text, dtype=np.int64) for text in texts]
        keys = [(part[:-2] * vocab_size + part[1:-1]) * vocab_size + part[2:] for part in parts if len(part) > 2]
        if not keys:
            raise ValueError("a trigram model needs a text of three tokens")
        triples, counts = np.unique(np.concatenate(keys), return_counts=True)
        pairs, fans = np.unique(triples % vocab_size**2, return_counts=True)
        singles, widths = np.unique(pairs % vocab_size, return_counts=True)
        discount = _discount(widths)
        single = np.full(vocab_size, discount * len(singles) / widths.sum() / vocab_size)
        single[singles] += np.maximum(widths - discount, 0.0) / widths.sum()
        return cls(
            single.astype(np.float32), _order(pairs, fans, vocab_size, 1), _order(triples, counts, vocab_size, least)
        )

    def row(self, u: int, v: int) -> Tensor:
        """Return p(. | u, v), float32 [V]."""
        found = self._single.copy()
        for order, context in ((self._pairs, v), (self._triples, u * self.vocab_size + v)):
            start, stop, below = _at(order, context)
            found *= np.float32(below)
            found[order.tokens[start:stop]] += order.own[start:stop]
        return torch.from_numpy(found)

    def logs(self, u: int, v: int, tokens: Sequence[int]) -> list[float]:
        """Return log p(w | u, v) of the given tokens."""
        single, found = self._singles, []
        (own_2, below_2), (own_3, below_3) = self._above(1, v), self._above(2, u * self.vocab_size + v)
        for token in tokens:
            p = below_2 * single[token] + own_2.get(token, 0.0)
            found.append(math.log(below_3 * p + own_3.get(token, 0.0)))
        return found

    def _above(self, order: int, context: int) -> tuple[dict[int, float], float]:
        """Return the probabilities that a context of pairs (1) or triples (2) adds, and the mass of the order below."""
        found = self._looked_up.get((order, context))
        if found is None:
            if len(self._looked_up) >= _KEPT:
                self._looked_up.clear()
            table = self._pairs if order == 1 else self._triples
            start, stop, below = _at(table, context)
            entries = zip(table.tokens[start:stop].tolist(), table.own[start:stop].tolist(), strict=True)
            found = self._looked_up[order, context] = dict(entries), below
        return found

    def native(self) -> NativeGrams:
        """The same model in the layout of native code."""
        return NativeGrams(self._single, self._pairs, self._triples)

    # ------------------------------------------------------------------ files

    def save(self, folder: Path) -> None:
        """Write ``trigram.safetensors`` atomically."""
        from safetensors.numpy import save

        tensors = {"single": self._single}
        for name, order in (("pairs", self._pairs), ("triples", self._triples)):
            tensors |= {f"{name}.{field}": getattr(order, field) for field in Entries._fields}
        write_whole(folder / FILE, save(tensors))

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> "Trigram":
        """Read a saved model.

        Args:
            vocab_size: of the target.
        Raises:
            ModelError: the file does not exist, is damaged, or has another vocabulary.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
            orders = [
                Entries(**{field: tensors[f"{name}.{field}"] for field in Entries._fields})
                for name in ("pairs", "triples")
            ]
            found = cls(tensors["single"], *orders)
        except FileNotFoundError:
            raise ModelError(f"{path}: there is no trigram model; foretoken train diffuspec writes one") from None
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise ModelError(f"{path}: the trigram model cannot be read ({str(error).splitlines()[0]})") from None
        if found.vocab_size != vocab_size:
            raise ModelError(
                f"{path}: the trigram model is over {found.vocab_size} tokens, the target has {vocab_size}"
            )
        return found


def _at(order: Entries, context: int) -> tuple[int, int, float]:
    """Return begin and end of a context's entries, and the mass of the order below; (0, 0, 1) for an unseen context."""
    place = int(np.searchsorted(order.contexts, context))
    if place == len(order.contexts) or order.contexts[place] != context:
        return 0, 0, 1.0
    return int(order.starts[place]), int(order.starts[place + 1]), float(order.below[place])


def _discount(counts: np.ndarray) -> float:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def _order(keys: np.ndarray, counts: np.ndarray, vocab_size: int, least: int) -> Entries:
    """Build one order from its sorted keys, context * V + token, and their counts."""
    discount = _discount(counts)
    contexts, first = np.unique(keys // vocab_size, return_index=True)
    totals = np.add.reduceat(counts, first)
    of: np.ndarray = np.repeat(np.arange(len(contexts)), np.diff([*first, len(keys)]))
    own = np.maximum(counts - discount, 0.0) / totals[of]
    kept = counts >= least
    below = 1.0 - np.bincount(of[kept], own[kept], minlength=len(contexts))
    some = np.bincount(of[kept], minlength=len(contexts))
    left = some > 0  # a context without entries behaves like an unseen one
    return Entries(
        contexts=contexts[left],
        starts=np.concatenate([[0], np.cumsum(some[left])]).astype(np.int32),
        tokens=(keys[kept] % vocab_size).astype(np.uint16 if vocab_size <= 1 << 16 else np.int32),
        own=own[kept].astype(np.float32),
        below=below[left].astype(np.float32),
    )
