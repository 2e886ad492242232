"""Muon for the matrices inside the layers, AdamW for everything else, and the schedule that both follow.

Muon (Jordan et al., 2024) orthogonalises the momentum of a matrix; embeddings, heads, norms, biases, convolutions and
the small parameters of a state-space mixer have no such geometry and go to AdamW, the last four without weight decay.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from foretoken.train.muon import Muon


@dataclass(frozen=True)
class Rates:
    """Learning rates and decay.

    Attributes:
        muon: peak rate of the matrices, in AdamW's units (an update has the RMS that AdamW's has);
            None leaves them to AdamW.
        adamw: peak rate of the others.
        weight_decay: of matrices and embeddings.
        warmup: share of the run in which the rate rises.
        decay: share of the run, at its end, in which it falls to zero.
    """

    muon: float | None = 3e-3
    adamw: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    decay: float = 0.5

    def scaled(self, factor: float) -> "Rates":
        """Both peaks times a factor."""
        return replace(self, muon=None if self.muon is None else self.muon * factor, adamw=self.adamw * factor)

    def at(self, progress: float) -> float:
        """The factor on the peak rates when a share ``progress`` of the run is done: up, level, down to zero."""
        rise = min(1.0, progress / self.warmup) if self.warmup else 1.0
        fall = min(1.0, max(0.0, 1.0 - progress) / self.decay) if self.decay else 1.0
        return max(rise, 0.05) * fall


class Optimiser:
    """Two optimisers that step together.

    Args:
        model: to train; parameters that need no gradient are left out.
    """

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        self._rates = rates
        matrices, decayed, plain = {}, {}, {}
        embeddings = _parameters(_embeddings(model))
        convolutions = _parameters(each for each in model.modules() if isinstance(each, nn.Conv1d))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2 or id(parameter) in convolutions:
                plain[name] = parameter
            elif parameter.ndim > 2 or id(parameter) in embeddings or rates.muon is None:
                decayed[name] = parameter  # a stack of experts is no matrix to Muon
            else:
                matrices[name] = parameter
        self._named: list[dict[str, nn.Parameter]] = []
        self._optimisers: list[torch.optim.Optimizer] = []
        if matrices:
            self._named.append(matrices)
            self._optimisers.append(
                Muon(matrices.values(), lr=float(rates.muon or 0), weight_decay=rates.weight_decay, momentum=0.95)
            )
        groups = [
            {"params": list(decayed.values()), "weight_decay": rates.weight_decay},
            {"params": list(plain.values()), "weight_decay": 0.0},
        ]
        if groups := [group for group in groups if group["params"]]:
            self._named.append({**decayed, **plain})
            self._optimisers.append(torch.optim.AdamW(groups, lr=rates.adamw, betas=(0.9, 0.95)))
        self._peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in self._optimisers]

    def step(self, progress: float) -> float:
        """Clip, step with the rate of this moment, and forget the gradients.

        Returns:
            the norm of the gradient before clipping; if it is not finite, the parameters stay as they were.
        """
        parameters = [parameter for named in self._named for parameter in named.values()]
        norm = float(nn.utils.clip_grad_norm_(parameters, 1.0))
        factor = self._rates.at(progress)
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            if math.isfinite(norm):
                optimiser.step()
            optimiser.zero_grad()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """The state as named tensors, for a checkpoint."""
        found = {}
        for name, key, value in self._state():
            found[f"{name}/{key}"] = torch.as_tensor(value).detach().clone()
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over the state of a checkpoint."""
        for optimiser, named in zip(self._optimisers, self._named, strict=True):
            for name, parameter in named.items():
                prefix = f"{name}/"
                state = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
                if state:
                    optimiser.state[parameter] = {
                        key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
                    }

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        for optimiser, named in zip(self._optimisers, self._named, strict=True):
            for name, parameter in named.items():
                for key, value in optimiser.state.get(parameter, {}).items():
                    yield name, key, value


def _embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        yield head


def _parameters(modules: Iterator[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}
