"""One linear unit with a sigmoid behind it: what SPRINTER's and Judge Decoding's heads are made of.

    x [M, D] ── w.x + b ── sigmoid ── a probability a row

Letters: M rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.core.files import write_whole


class Logistic:
    """w and b, and the file that holds them.

    Args:
        weight_D, bias: kept as float32.
    """

    def __init__(self, weight_D: Tensor, bias: float) -> None:
        self.weight_D = weight_D.detach().float()
        self.bias = bias

    def probabilities(self, x_MD: Tensor) -> Tensor:
        """The sigmoid of w.x + b, float32 [M]."""
        # in float64: how a row is summed depends on the rows beside it, and what a row gets must not
        return torch.sigmoid(x_MD.double() @ self.weight_D.double().to(x_MD.device) + self.bias).float()

    def save(self, path: Path) -> None:
        """Write a whole safetensors file, or none: ``weight`` [D] and ``bias`` [1]."""
        from safetensors.torch import save

        write_whole(path, save({"weight": self.weight_D.cpu().contiguous(), "bias": torch.tensor([self.bias])}))

    @classmethod
    def load(cls, path: Path, width: int) -> Logistic:
        """Read such a file; call it inside of :func:`reading`.

        Raises:
            ValueError: what it holds is no unit of this width.
        """
        from safetensors.torch import load_file

        weights = load_file(path)
        weight_D, bias = weights["weight"], weights["bias"]
        if type(width) is not int or weight_D.shape != (width,) or bias.shape != (1,):
            raise ValueError(f"width={width!r} with weights {list(weight_D.shape)} and {list(bias.shape)}")
        if not bool(torch.isfinite(weight_D).all()) or not bool(torch.isfinite(bias).all()):
            raise ValueError("weights that are NaN or infinite")
        return cls(weight_D, float(bias))


@contextmanager
def reading(folder: Path, what: str, *files: str) -> Iterator[None]:
    """Say in one line what is wrong with a head's folder.

    Args:
        what: as in "no `what`": "SPRINTER head".
        files: what the folder should hold.
    Raises:
        ModelError: a file is missing, or says what cannot be.
    """
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"{folder}: has no {what} ({' and '.join(files)})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder}: the head cannot be read ({str(error).splitlines()[0]})") from None
