"""Randomness: explicit streams per request and purpose, and noise that is a function of (seed, position).

Two kinds, because two promises need them:

* :class:`Streams` gives every request one generator per *purpose*, so that drawing one more number for drafting never
  shifts the numbers used for accepting. Sharing one number between draft and accept is a bias.
* :func:`gumbel` is counter-based: the noise of a token at a position depends on nothing but (seed, position, token).
  The `match` verifier and plain sampling both use it; hence the same stream with speculation on or off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
PURPOSES = ("draft", "accept", "residual", "bonus")


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
        """The generator of one purpose (draft, accept, residual, bonus), made when first asked for."""
        found = self._generators.get(purpose)
        if found is None:
            found = torch.Generator(device=self.device)
            found.manual_seed(mix64(self.seed ^ mix64(PURPOSES.index(purpose))) >> 1)
            self._generators[purpose] = found
        return found

    def uniform(self, purpose: str, count: int) -> Tensor:
        """float32 [count], uniform on [0, 1)."""
        return torch.rand(count, generator=self.generator(purpose), device=self.device)

    def categorical(self, purpose: str, p_V: Tensor) -> int:
        """One draw from non-negative weights; they need not sum to 1, but must have a positive sum."""
        return int(torch.multinomial(p_V, 1, generator=self.generator(purpose)))


@lru_cache(maxsize=8)
def _token_codes(vocab_size: int, device: torch.device) -> Tensor:
    """int32 [V]: an odd multiple of the token id, computed once per vocabulary."""
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return ((ids * 0x9E3779B1) & 0xFFFFFFFF).sub_(0x80000000).to(torch.int32)


def _as_int32(value: int) -> int:
    return (value & 0xFFFFFFFF) - 0x80000000


def _mix32(x: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser, in place. torch shifts are arithmetic, so the sign's copies are masked off."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85EBCA6B
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    return x


def exponential(seed: int, positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Unit exponential noise as a function of (seed, position, token).

    ``argmin(noise / p)`` is a draw from p: the exponential race, equal to the Gumbel-max rule.

    Args:
        seed: the request's seed.
        positions: M absolute token positions; the noise of a position does not depend on the others.
        vocab_size: V.
        device: where the result lives; the values are the same on every device up to the rounding of log.
    Returns:
        float32 [M, V], strictly positive.
    """
    codes_V = _token_codes(vocab_size, torch.device(device))
    keys = [mix64(mix64(seed) ^ position) for position in positions]
    first = torch.tensor([_as_int32(key) for key in keys], dtype=torch.int32, device=device)
    second = torch.tensor([_as_int32(key >> 32) for key in keys], dtype=torch.int32, device=device)
    bits_MV = codes_V[None, :] ^ first[:, None]
    _mix32(bits_MV)
    bits_MV ^= second[:, None]  # a second key and round: rows are then unrelated, not shifted copies
    _mix32(bits_MV)
    # 24 random bits centred in their cell: u in (0, 1), never 0 or 1, exact in float32
    u_MV = ((bits_MV >> 8) & 0xFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-24)
    return u_MV.log_().neg_()


def gumbel(seed: int, positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Gumbel noise, float32 [M, V]: ``argmax(log p + noise)`` is a draw from p. See :func:`exponential`."""
    return exponential(seed, positions, vocab_size, device).log_().neg_()
