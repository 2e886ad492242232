"""Randomness: explicit streams per request and purpose, and noise that is a function of (seed, position).

Two kinds, because two promises need them:

* :class:`Streams` gives every request one generator per *purpose*, so that drawing one more number for drafting never
  shifts the numbers used for accepting. Sharing one number between draft and accept is a bias.
* :func:`gumbel` is counter-based: the noise of a token at a position depends on nothing but (seed, position, token).
  The `match` verifier and plain sampling both use it; hence the same stream with speculation on or off.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
PURPOSES = ("draft", "accept", "residual", "bonus")
_BLOCK = 1024  # categorical draws: tokens per block of a large vocabulary


def mix64(value: int) -> int:
    """The finaliser of splitmix64: a bijection on 64-bit integers that scatters neighbouring inputs."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


class Streams:
    """The random streams of one request.

    Args:
        seed: the request's seed; equal seeds give equal streams.
        device: where drawn tensors live.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.device = torch.device(device)
        self._generators: dict[str, torch.Generator] = {}

    def generator(self, purpose: str) -> torch.Generator:
        """The generator of one purpose (draft, accept, residual, bonus), made at its first use."""
        found = self._generators.get(purpose)
        if found is None:
            found = torch.Generator(device=self.device)
            found.manual_seed(mix64(self.seed ^ mix64(PURPOSES.index(purpose))) >> 1)
            self._generators[purpose] = found
        return found

    def mark(self) -> dict[str, Tensor]:
        """Where the streams stand, for :meth:`rewind`."""
        return {purpose: generator.get_state() for purpose, generator in self._generators.items()}

    def rewind(self, mark: dict[str, Tensor]) -> None:
        """Go back to a mark, as if nothing had been drawn since."""
        for purpose in set(self._generators) - set(mark):
            del self._generators[purpose]  # it begins anew at its next use
        for purpose, state in mark.items():
            self._generators[purpose].set_state(state)

    def uniform(self, purpose: str, count: int) -> Tensor:
        """float32 [count], uniform on [0, 1)."""
        return torch.rand(count, generator=self.generator(purpose), device=self.device)

    def bernoulli(self, purpose: str, chances: Sequence[float]) -> list[bool]:
        """Independent decisions, the i-th true with probability ``chances[i]`` (clipped to [0, 1]).

        One uniform of 53 bits per decision: on a float32 grid a chance of 1e-9 would come true with 6e-8.
        Drafters and verifiers use nothing but this, :meth:`categorical` and :meth:`distinct`, so that the enumeration
        of analysis/exactness can replay them.
        """
        u = torch.rand(len(chances), dtype=torch.float64, generator=self.generator(purpose), device=self.device)
        return [below < chance for below, chance in zip(u.tolist(), chances, strict=True)]

    def categorical(self, purpose: str, p_V: Tensor) -> int:
        """One draw from non-negative weights; they need not sum to 1, but must have a positive sum.

        Inverts the running sum with one 53-bit uniform, block by block where the vocabulary is large; about ten
        times faster than torch.multinomial at V = 8k, and a token of zero weight is never drawn.
        """
        draw = torch.rand(1, dtype=torch.float64, generator=self.generator(purpose), device=self.device)
        if p_V.shape[0] <= 2 * _BLOCK:
            return _invert(p_V, draw)
        whole = p_V.shape[0] // _BLOCK * _BLOCK
        blocks = p_V[:whole].view(-1, _BLOCK).sum(-1)
        if whole < p_V.shape[0]:
            blocks = torch.cat([blocks, p_V[whole:].sum(0, keepdim=True)])
        first = _invert(blocks, draw) * _BLOCK
        # a second uniform for the inside of the block: exact, and no remainder to lose bits in
        draw = torch.rand(1, dtype=torch.float64, generator=self.generator(purpose), device=self.device)
        return first + _invert(p_V[first : first + _BLOCK], draw)

    def foreseen(self, purpose: str, size: int, count: int) -> list[float]:
        """What the next draws of :meth:`categorical` are made by; the stream stays where it stands.

        Args:
            size: weights of each of them.
            count: draws.
        Returns:
            two uniforms for each draw: of the block and inside it, or where there is one block, of the draw and 0.
        """
        generator = self.generator(purpose)
        state = generator.get_state()
        each = 1 if size <= 2 * _BLOCK else 2
        drawn = [
            torch.rand(1, dtype=torch.float64, generator=generator, device=self.device).item()
            for _ in range(each * count)
        ]
        generator.set_state(state)
        return drawn if each == 2 else [number for uniform in drawn for number in (uniform, 0.0)]

    def distinct(self, purpose: str, q_V: Tensor, count: int) -> list[int]:
        """``count`` different tokens in the order of their draws, each without the ones before it.

        There must be so many of positive weight.
        """
        return torch.multinomial(q_V, count, generator=self.generator(purpose)).tolist()


def categorical_rows(rngs: Sequence[Streams], purpose: str, weights_BV: Tensor) -> list[int]:
    """One draw per request from its row of non-negative weights, [B, V]; see :meth:`Streams.categorical`.

    The same uniforms as B separate draws, the running sums of all rows in one operation.
    """
    if len(rngs) == 1:
        return [rngs[0].categorical(purpose, weights_BV[0])]
    vocab_size = weights_BV.shape[1]
    num_draws = 1 if vocab_size <= 2 * _BLOCK else 2
    draws = [
        torch.rand(num_draws, dtype=torch.float64, generator=rng.generator(purpose), device=rng.device) for rng in rngs
    ]
    draws_BU = torch.stack(draws)
    if num_draws == 1:
        found = _invert_rows(weights_BV, draws_BU)
    else:
        padded_BV = torch.nn.functional.pad(weights_BV, (0, -vocab_size % _BLOCK))
        blocks_BKC = padded_BV.view(len(rngs), -1, _BLOCK)
        first_B = _invert_rows(blocks_BKC.sum(-1), draws_BU[:, :1])
        inside_BC = blocks_BKC[torch.arange(len(rngs), device=first_B.device), first_B]
        found = first_B * _BLOCK + _invert_rows(inside_BC, draws_BU[:, 1:])
    return found.tolist()


def _invert_rows(weights_BK: Tensor, draw_B1: Tensor) -> Tensor:
    """:func:`_invert` for every row, int64 [B]."""
    upto_BK = weights_BK.cumsum(1, dtype=torch.float64)
    index_B = torch.searchsorted(upto_BK, draw_B1 * upto_BK[:, -1:], right=True)[:, 0]
    return torch.where(index_B < weights_BK.shape[1], index_B, weights_BK.argmax(1))


def _invert(weights: Tensor, draw: Tensor) -> int:
    """The index with ``draw`` (float64 [1] on [0, 1)) in its share of the running sum; its weight is positive."""
    upto = weights.cumsum(0, dtype=torch.float64)
    index = int(torch.searchsorted(upto, draw * upto[-1], right=True))
    if index < weights.shape[0]:
        return index
    return int(weights.argmax())  # draw * sum rounded up to the sum: a chance of about 2**-53


@lru_cache(maxsize=8)
def _token_codes(vocab_size: int, device: torch.device) -> Tensor:
    """int32 [V]: an odd multiple of the token id, computed once per vocabulary."""
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return ((ids * 0x9E3779B1) & 0xFFFFFFFF).sub_(0x80000000).to(torch.int32)


def _as_int32(value: int) -> int:
    return (value & 0xFFFFFFFF) - 0x80000000


def _mix32(x: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser, in place. torch shifts are arithmetic, so the sign's copies are masked off."""
    shifted = torch.bitwise_right_shift(x, 16)
    shifted &= 0xFFFF
    x ^= shifted
    x *= -2048144789  # 0x85EBCA6B
    torch.bitwise_right_shift(x, 13, out=shifted)
    shifted &= 0x7FFFF
    x ^= shifted
    x *= -1028477387  # 0xC2B2AE35
    torch.bitwise_right_shift(x, 16, out=shifted)
    shifted &= 0xFFFF
    x ^= shifted
    return x


def exponential(
    seed: int, positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu", ids: Tensor | None = None
) -> Tensor:
    """Unit exponential noise as a function of (seed, position, token).

    ``argmin(noise / p)`` is a draw from p: the exponential race, equal to the Gumbel-max rule.

    Args:
        seed: the request's seed.
        positions: M absolute token positions; the noise of a position does not depend on the others.
        vocab_size: V.
        device: where the result lives; the values are the same on every device up to the rounding of log.
        ids: int64 [K]: only these tokens' noise, the same values as in the full row. None means all V.
    Returns:
        float32 [M, V] (or [M, K]), strictly positive and finite.
    """
    codes_V = _token_codes(vocab_size, torch.device(device))
    if ids is not None:
        codes_V = codes_V[ids]
    keys = [mix64(mix64(seed) ^ position) for position in positions]
    # an odd multiplier and an offset of its own per row: rows are then unrelated, not shifted copies
    factor_M = torch.tensor([_as_int32(key) | 1 for key in keys], dtype=torch.int32, device=device)
    offset_M = torch.tensor([_as_int32(key >> 32) for key in keys], dtype=torch.int32, device=device)
    bits_MV = codes_V * factor_M[:, None]
    bits_MV += offset_M[:, None]
    _mix32(bits_MV)
    bits_MV &= 0x7FFFFFFF
    # u small means noise small, and the smallest noise wins the race: floats are finest there (down to 2**-32).
    # Rounding lifts the largest u to 1; the clamp keeps its noise finite.
    u_MV = bits_MV.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u_MV.neg_().log1p_().neg_()


def gumbel(
    seed: int, positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu", ids: Tensor | None = None
) -> Tensor:
    """Gumbel noise, float32 [M, V]: ``argmax(log p + noise)`` is a draw from p. See :func:`exponential`."""
    return exponential(seed, positions, vocab_size, device, ids).log_().neg_()
