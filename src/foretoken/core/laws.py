"""From logits to *the* processed distribution: one function, used identically for draft, verification and bonus.

A distribution is processed at every node of a tree under the history that the node stands for: penalties and min_tokens
count the tokens on the path to the node as if they had been emitted.

Letters: M rows, V vocabulary, D width of the target, C columns of a drafter that scores some tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.constraint import Constraint
from foretoken.core.logits_processors import LogitsProcessors
from foretoken.core.repetitions import Repetitions
from foretoken.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from foretoken.options.sampling import SamplingParams

_CANDIDATES = 512  # top-p looks at so many tokens before it looks at the whole vocabulary
_BLOCK = 64  # tokens of a large vocabulary that are passed over together
_SORTED = 2_048  # tokens at most that are sorted rather than counted
_SELECT_FROM = 16_384  # tokens from which it looks at all of them at once


class Laws:
    """The target's distributions for one request in one step: row 0 after the root, row i + 1 after draft node i.

    A rule that walks a tree visits few of its rows, and a row of a large vocabulary is expensive to process: rows are
    processed when they are looked at. A rule that needs all of them takes ``logits_MV`` or ``p_MV``.

    Args:
        logits_MV: logits (any float dtype if greedy, float32 otherwise), processed already (-inf outside the filters)
            unless ``process`` is given.
        greedy: the distribution is the argmax of each row.
        positions: position of the token that each row decides, M integers.
        best: argmax of every row if the caller already has it.
        process: gives the processed logits of a range of rows, from their raw logits; None: ``logits_MV`` is processed.
        support: gives :meth:`support_at` of a row, from its raw logits, without the processed row; None: not there.
        hidden: gives ``hidden_MD``; None: no verifier needs it.
        stop_ids: tokens that end this request.
        probe_logits_PV: raw logits of the rows that the verifier probes after the draft, in the order of its tree
            (``Verifier.probe``); None: it probes nothing, or the step had no rows left for them.

    Attributes:
        raw_MV: the model's own logits, before bias, penalties, temperature and filters; not to be written to. Where no
            ``process`` is given they are what the distributions were made of.
    """

    def __init__(
        self,
        logits_MV: Tensor,
        *,
        greedy: bool,
        positions: Sequence[int],
        best: Sequence[int] | None = None,
        process: Callable[[Tensor, range], Tensor] | None = None,
        support: Callable[[Tensor, int], tuple[Tensor, Tensor] | None] | None = None,
        hidden: Callable[[], Tensor] | None = None,
        stop_ids: frozenset[int] = frozenset(),
        probe_logits_PV: Tensor | None = None,
    ) -> None:
        self.greedy = greedy
        self.positions = positions
        self.stop_ids = stop_ids
        self.probe_logits_PV = probe_logits_PV
        self._hidden = hidden
        self.raw_MV = logits_MV
        self._process = process
        self._support = support
        self._rows: dict[int, Tensor] = {}
        if process is None:
            self.__dict__["logits_MV"] = logits_MV
        if best is not None:
            self.__dict__["best"] = best

    def __len__(self) -> int:
        return len(self.positions)

    def over(self, raw_MV: Tensor, changed: Collection[int] = ()) -> Laws:
        """The same rows with other raw logits, [M, V]: bias, penalties and filters are applied to these.

        Args:
            changed: rows with other logits. Above temperature 0 a token that the filters exclude in such a row here is
                excluded there as well; where that leaves no token, the row stays as it is here.
        """

        def process(x_MV: Tensor, rows: range) -> Tensor:
            found_MV = x_MV.clone() if self._process is None else self._process(x_MV, rows)
            for place, row in enumerate(rows):
                if row in changed:
                    own_V = self.logits_at(row)
                    both_V = found_MV[place].masked_fill(own_V == -torch.inf, -torch.inf)
                    found_MV[place] = both_V if bool((both_V > -torch.inf).any()) else own_V
            return found_MV

        return Laws(
            raw_MV,
            greedy=self.greedy,
            positions=self.positions,
            process=self._process if self.greedy or not changed else process,
            hidden=self._hidden,
            stop_ids=self.stop_ids,
        )

    @property
    def vocab_size(self) -> int:
        return self.raw_MV.shape[-1]

    @property
    def on_gpu(self) -> bool:
        """Whether one launch for all rows costs less than one for each."""
        return self.raw_MV.is_cuda

    @cached_property
    def logits_MV(self) -> Tensor:
        """Processed logits of every row, [M, V]."""
        assert self._process is not None
        return self._process(self.raw_MV, range(len(self)))

    @cached_property
    def hidden_MD(self) -> Tensor:
        """The target's last hidden state of each row, float32 [M, D], computed when it is first looked at.

        A row's state is that *of* its token, after reading it: row i + 1 is what the target makes of draft node i, and
        the distribution of that row is the model's expectation after the node. The distribution that node i is drawn
        from is its parent's row.

        Raises:
            ValueError: they were not kept: the verifier does not need them.
        """
        if self._hidden is None:
            raise ValueError(
                "no hidden states were kept: a verifier that reads them says so (needs = Needs(last_state=LastState()))"
            )
        return self._hidden()

    @cached_property
    def best(self) -> Sequence[int]:
        """The most probable token of each row."""
        return self.logits_MV.argmax(dim=-1).tolist()

    @cached_property
    def p_MV(self) -> Tensor:
        """Probabilities, [M, V], one-hot rows if greedy; float32, or float64 where the logits are (for enumeration)."""
        if self.greedy:
            p_MV = torch.zeros(self.logits_MV.shape, dtype=torch.float32, device=self.logits_MV.device)
            index = torch.tensor(list(self.best), device=p_MV.device)
            return p_MV.scatter_(1, index[:, None], 1.0)
        return _softmax(self.logits_MV)

    def logits_at(self, row: int) -> Tensor:
        """Processed logits of one row, [V]."""
        if self._process is None or self.on_gpu or "logits_MV" in self.__dict__:
            return self.logits_MV[row]
        if row not in self._rows:
            self._rows[row] = self._process(self.raw_MV[row : row + 1], range(row, row + 1))[0]
        return self._rows[row]

    def support_at(self, row: int) -> tuple[Tensor, Tensor] | None:
        """The tokens that the filters leave in one row, int64 [K], and their processed logits; None: there are none."""
        if self._support is not None and row not in self._rows and "logits_MV" not in self.__dict__:
            found = self._support(self.raw_MV[row : row + 1], row)
            if found is not None:
                return found
        logits_V = self.logits_at(row)
        if float(logits_V.amin()) > -torch.inf:
            return None
        ids = (logits_V > -torch.inf).nonzero()[:, 0]
        return ids, logits_V[ids]

    def p_at(self, row: int) -> Tensor:
        """Probabilities of one row, [V]; one-hot if greedy."""
        if self.greedy or self.on_gpu or "p_MV" in self.__dict__:
            return self.p_MV[row]
        return _softmax(self.logits_at(row))


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


class LawMaker:
    """Turns raw logits into processed logits for one request, and keeps the history that penalties need.

    Args:
        params: the request's parameters.
        prompt: prompt token ids.
        vocab_size: V.
        stop_ids: tokens that end this request (used by min_tokens).
        device: where the logits live.
        constraint: on the text; it reads every appended token.
        breakers: tokens that no repetition of DRY's goes across.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),
        device: torch.device | str = "cpu",
        constraint: Constraint | None = None,
        breakers: frozenset[int] = frozenset(),
    ) -> None:
        self.params = params
        self._repeats = Repetitions(params, prompt, breakers) if Repetitions.wanted(params) else None
        self.constraint = constraint
        self.num_output = 0
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._stop_ids = torch.tensor(sorted(i for i in stop_ids if i < vocab_size), dtype=torch.int64, device=device)
        self._counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._seen = params.repetition_penalty != 1.0
        self._output_V = torch.zeros(vocab_size, device=device) if self._counts else None
        self._seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device) if self._seen else None
        if self._seen_V is not None and prompt:
            self._seen_V[torch.tensor(prompt, device=device)] = True
        self._processors = LogitsProcessors(params.logits_processors or (), prompt)
        bias = params.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        penalised = self._counts or self._seen or self._repeats is not None
        self._shapes = bool(bias) or bool(self._processors) or penalised

    def copy(self) -> LawMaker:
        """An independent maker with the same history (for the completions of one prompt)."""
        twin = LawMaker.__new__(LawMaker)
        twin.__dict__.update(self.__dict__)
        twin._output_V = None if self._output_V is None else self._output_V.clone()
        twin._seen_V = None if self._seen_V is None else self._seen_V.clone()
        twin._processors = self._processors.copy()
        twin._repeats = None if self._repeats is None else self._repeats.copy()
        twin.constraint = None if self.constraint is None else self.constraint.copy()
        return twin

    @property
    def trivial(self) -> bool:
        """True when the distribution is the argmax of the raw logits: nothing to compute."""
        return self.params.greedy and not self.may_forbid

    @property
    def may_forbid(self) -> bool:
        """Whether something else than temperature and filters changes the distribution, and may leave no token."""
        return self._shapes or self.constraint is not None or self.num_output < self.params.min_tokens

    @property
    def tempered(self) -> bool:
        """True when the distribution is the softmax of the raw logits over the temperature, and the temperature is
        above 0.
        """
        params = self.params
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.xtc_probability > 0
        return not params.greedy and not filtered and not self.may_forbid

    def append(self, tokens: Sequence[int]) -> None:
        """Commit emitted tokens to the history."""
        self.num_output += len(tokens)
        self._processors.append(tokens)
        if self.constraint is not None:
            self.constraint.append(tokens)
            if self.constraint.idle:
                self.constraint = None
        if self._repeats is not None:
            self._repeats.append(tokens)
        if self._output_V is not None or self._seen_V is not None:
            ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
            if self._output_V is not None:
                self._output_V.index_add_(0, ids, torch.ones(len(tokens), device=self.device))
            if self._seen_V is not None:
                self._seen_V[ids] = True

    def process(
        self, logits_MV: Tensor, tree: TokenTree, nodes: Sequence[int], columns: Columns | None = None
    ) -> Tensor:
        """Apply processors, bias, penalties, min_tokens, constraint, temperature and filters under each row's history.

        Args:
            logits_MV: raw logits; not modified.
            tree: the tree that ``nodes`` refer to.
            nodes: M node indices; row m is the distribution after node ``nodes[m]`` (-1: after the root).
            columns: of the logits, [M, C] then; None: column i is token i. The result is what the whole row would
                give with -inf at every other token.
        Returns:
            float32 [M, V] (or [M, C]) processed logits; -inf where the processed distribution is zero. At temperature 0
            no filter is applied: the distribution is the argmax of the result.
        """
        x_MV = self._shaped(logits_MV, tree, nodes, columns)
        return x_MV if self.params.greedy else _filter(x_MV, self.params)

    def support(self, logits_1V: Tensor, tree: TokenTree, node: int) -> tuple[Tensor, Tensor] | None:
        """The tokens that the filters leave after a node, increasing, and their processed logits, [K] each.

        None: :meth:`process` is to be called. Its row is not made here: in a large vocabulary that takes longer.
        """
        params = self.params
        others = params.top_k > 0 or params.min_p > 0.0 or params.xtc_probability > 0.0
        small = logits_1V.is_cuda or logits_1V.shape[-1] < _SELECT_FROM
        if params.greedy or params.top_p == 1.0 or others or small:
            return None
        x_V = self._shaped(logits_1V, tree, (node,), None)[0]
        ids = _nucleus(torch.softmax(x_V, dim=-1), params.top_p)
        return ids, x_V[ids]

    def _shaped(self, logits_MV: Tensor, tree: TokenTree, nodes: Sequence[int], columns: Columns | None) -> Tensor:
        """What :meth:`process` gives before the filters."""
        params = self.params
        if not self.may_forbid and not params.greedy and 1e-3 <= params.temperature < 1e30:
            return logits_MV.float() / params.temperature
        x_MV = logits_MV.to(torch.float32, copy=True)
        if self._processors:
            for row, node in enumerate(nodes):
                path = [tree.tokens[each] for each in tree.path_to(node)]
                x_MV[row] = self._processors.apply(x_MV[row], path, columns)
        if self._bias_ids.numel():
            if columns is None:
                x_MV[:, self._bias_ids] += self._bias
            else:
                which, own = columns.found(self._bias_ids)
                x_MV[:, own] += self._bias[which]
        if self._counts or self._seen:
            self._penalise(x_MV, tree, nodes, columns)
        if self._repeats is not None:
            for row, node in enumerate(nodes):
                for token, penalty in self._repeats.penalties([tree.tokens[i] for i in tree.path_to(node)]).items():
                    column = token if columns is None else columns.of(token)
                    if 0 <= column < x_MV.shape[-1]:
                        x_MV[row, column] -= penalty
        if self.num_output < params.min_tokens and self._stop_ids.numel():
            stops = self._stop_ids if columns is None else columns.found(self._stop_ids)[1]
            for row, node in enumerate(nodes):
                depth = 0 if node == ROOT else tree.depths[node]
                if self.num_output + depth < params.min_tokens:
                    x_MV[row, stops] = -torch.inf
        if self.constraint is not None:
            self._constrain(self.constraint, x_MV, tree, nodes, columns)
        if params.greedy:
            return x_MV
        if params.temperature != 1.0:
            if params.temperature < 1e-3:
                # quotients may overflow: with the maximum at zero they go to -inf at worst, which is right
                x_MV -= x_MV.amax(-1, keepdim=True)
            x_MV /= min(max(params.temperature, 1e-30), 1e30)  # float32 has none beyond to divide by safely
        return x_MV

    def _constrain(
        self, constraint: Constraint, x_MV: Tensor, tree: TokenTree, nodes: Sequence[int], columns: Columns | None
    ) -> None:
        """Mask tokens that may not follow; rows out of reach, or with forbidden columns only, stay unchanged."""
        for row, node in enumerate(nodes):
            mask = constraint.allowed([tree.tokens[each] for each in tree.path_to(node)])
            if mask is not None and columns is not None:
                mask = mask[columns.ids_C]
                mask = mask if mask.any() else None
            if mask is not None:
                x_MV[row].masked_fill_(~mask, -torch.inf)

    def _penalise(self, x_MV: Tensor, tree: TokenTree, nodes: Sequence[int], columns: Columns | None) -> None:
        for row, node in enumerate(nodes):
            path = [tree.tokens[i] for i in tree.path_to(node)]
            ids = torch.tensor(path, dtype=torch.int64, device=x_MV.device)
            x_V = x_MV[row]
            if self._seen_V is not None:
                seen_V = self._seen_V
                if path:
                    seen_V = seen_V.clone()
                    seen_V[ids] = True
                seen_V = seen_V if columns is None else seen_V[columns.ids_C]
                rate = self.params.repetition_penalty
                x_V.copy_(torch.where(seen_V, torch.where(x_V > 0, x_V / rate, x_V * rate), x_V))
            if self._output_V is not None:
                counts_V = self._output_V
                if path:
                    counts_V = counts_V.index_add(0, ids, torch.ones(len(path), device=x_MV.device))
                counts_V = counts_V if columns is None else counts_V[columns.ids_C]
                x_V -= self.params.frequency_penalty * counts_V + self.params.presence_penalty * (counts_V > 0)


def _filter(x_MV: Tensor, params: SamplingParams) -> Tensor:
    """min_p, then top_k, then top_p, in place; every row keeps at least its most probable token."""
    vocab_size = x_MV.shape[-1]
    if params.min_p > 0.0:
        floor_M1 = x_MV.amax(-1, keepdim=True) + math.log(params.min_p)
        x_MV.masked_fill_(x_MV < floor_M1, -torch.inf)
    if 0 < params.top_k < vocab_size:
        # exactly k tokens, ties broken by topk: indices, not a threshold, so that no tie slips in
        values, ids = x_MV.topk(params.top_k, dim=-1)
        x_MV.fill_(-torch.inf).scatter_(1, ids, values)
    if params.top_p < 1.0:
        _top_p(x_MV, params.top_p)
    if params.xtc_probability > 0.0:
        _exclude_top(x_MV, params.xtc_probability, params.xtc_threshold)
    return x_MV


def _exclude_top(x_MV: Tensor, probability: float, threshold: float) -> None:
    """XTC in place: the mixture of the distribution, and of the one without the best tokens but the last of them.

    Drawing whether to cut would make a token depend on more than its own draw; the mixture is the same distribution.
    """
    p_MV = torch.softmax(x_MV, dim=-1)
    best_MV = p_MV >= threshold
    last_M = p_MV.masked_fill(~best_MV, torch.inf).argmin(-1, keepdim=True)
    cut_MV = p_MV.masked_fill(best_MV.scatter(1, last_M, False), 0.0)
    cut_MV /= cut_MV.sum(-1, keepdim=True)
    several_M1 = best_MV.sum(-1, keepdim=True) > 1
    mixed_MV = (1.0 - probability) * p_MV + probability * cut_MV
    x_MV.copy_(torch.where(several_M1, mixed_MV.log(), x_MV))


def _top_p(x_MV: Tensor, top_p: float) -> None:
    """Keep the smallest set of most probable tokens with a mass of at least top_p, in place."""
    p_MV = torch.softmax(x_MV, dim=-1)
    vocab_size = x_MV.shape[-1]
    if x_MV.is_cuda or vocab_size < _SELECT_FROM:
        count = vocab_size if x_MV.is_cuda else min(_CANDIDATES, vocab_size)  # a GPU sorts everything as fast
        values, ids = p_MV.topk(count, dim=-1)
        mass = values.cumsum(-1)
        if count == vocab_size or bool((mass[:, -1] >= top_p).all()):
            keep = (mass - values) < top_p  # the mass before a token is still short of top_p
            keep[:, 0] = True
            kept = x_MV.gather(1, ids).masked_fill_(~keep, -torch.inf)
            x_MV.fill_(-torch.inf).scatter_(1, ids, kept)
            return
    for x_V, p_V in zip(x_MV, p_MV, strict=True):
        ids = _nucleus(p_V, top_p)
        kept = x_V[ids]
        x_V.fill_(-torch.inf)[ids] = kept


def _nucleus(p_V: Tensor, top_p: float) -> Tensor:
    """The tokens of :func:`_top_p`, increasing, int64 [K], of a large vocabulary: few of them are looked at.

    Nearly always the tokens that are at most a thousand times less probable than the best reach the mass. Those below
    (1 - top_p) / V have together less than 1 - top_p, so that the others reach it.
    """
    whole = len(p_V) // _BLOCK * _BLOCK
    blocks_BK = p_V[:whole].view(-1, _BLOCK)
    peaks_B = blocks_BK.amax(-1)  # takes a tenth of the time of a comparison with each token
    peak = float(peaks_B.max())
    for least in (peak if peak >= top_p else 1e-3 * peak, 0.999 * (1.0 - top_p) / len(p_V)):
        which = (peaks_B >= least).nonzero()
        inside = (blocks_BK[which[:, 0]].view(-1) >= least).nonzero()[:, 0]
        ids = (which * _BLOCK + torch.arange(_BLOCK)).view(-1)[inside]
        if whole < len(p_V):
            ids = torch.cat([ids, whole + (p_V[whole:] >= least).nonzero()[:, 0]])
        first = _first_of(p_V[ids], top_p)
        if first is not None:
            return ids[first.sort().values]
    return torch.arange(len(p_V))  # top_p is 1 but for rounding


def _first_of(p_K: Tensor, mass: float) -> Tensor | None:
    """The smallest set of most probable ones with that mass, as indices; of equals the first. None: it is not reached.

    Where there are many, they are counted by their upper 16 bits (sign, exponent and 7 bits of the mantissa, which
    order as they do), and only the bin in which the mass is reached is sorted.
    """
    if len(p_K) <= _SORTED:
        values, order = p_K.sort(descending=True, stable=True)
        upto = values.cumsum(0, dtype=torch.float64)
        return order[: int(torch.searchsorted(upto, mass)) + 1] if float(upto[-1]) >= mass else None
    bins_K = p_K.view(torch.int32) >> 16
    mass_B = torch.bincount(bins_K, weights=p_K.double()).flip(0).cumsum(0)
    number = int(torch.searchsorted(mass_B, mass))  # bins with a total mass below it
    if number == len(mass_B):
        return None
    border = len(mass_B) - 1 - number
    inside = (bins_K == border).nonzero()[:, 0]
    values, order = p_K[inside].sort(descending=True, stable=True)
    upto = (float(mass_B[number - 1]) if number else 0.0) + values.cumsum(0, dtype=torch.float64)
    more = inside[order[: int(torch.searchsorted(upto, mass)) + 1]]
    return torch.cat([(bins_K > border).nonzero()[:, 0], more])
