"""How well a published head agrees with a target: settles what its config leaves open, refuses another target's head.

The target reads a short text once, the shorter the larger the head is. The agreement of a reading of the config is the
share of places where the head's first draft is the target's greedy token. Values that the config states are kept; a
reading that agrees better is reported. Of values that it does not state, the best are taken. "Better" is by more than
chance: two standard errors of the comparison, place by place.

Letters: T tokens, F width of the fused states, R places, W width, V vocabulary, K draft vocabulary.
"""

import itertools
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.core.phases import PHASES
from foretoken.drafting.feature_heads.draft_ids import maps_of
from foretoken.drafting.feature_heads.pending_states import final_of, fused_states
from foretoken.drafting.feature_heads.state_network import StateNetwork
from foretoken.drafting.published.blocks import LayersConfig
from foretoken.drafting.published.vocabulary_maps import network_of
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Option

log = logging.getLogger(__name__)

PROBE = Option("At load, count whether a head without the target's fingerprint agrees with the target on a text.")
LEAST = 0.05  # a pair that agrees less is refused
_TOKENS = 128
FEWEST = 32  # a target with fewer positions is not probed
_PRODUCTS = 5e11  # of the network in all readings, about half a minute on two processors
_TEXT = """\
The river rises in the hills to the north of the town and flows through it from east to west. In spring, when the snow \
melts, the water is high, and children stand on the old stone bridge to watch it. "How far is it to the sea?" the girl \
wonders. "About two hundred miles," her father answers, "and every mile is beautiful." To add the numbers of a list \
in Python, write a function: def total(numbers): result = 0; for number in numbers: result = result + number; return \
result. The sum of 1, 2, 3 and 4 is 10, and the sum of 10, 20, 30 and 40 is 100. The capital of France is Paris, and \
the capital of Italy is Rome.
"""


AnyHead = TypeVar("AnyHead", bound="PublishedHead")


class PublishedHead(StateNetwork):
    """A network that other makers publish; its config may leave fields open (``config.silent``)."""

    config: LayersConfig
    rows_per_token = 1.0  # that :meth:`first_drafts` computes

    @abstractmethod
    def readings(self, target: LanguageModel) -> Mapping[str, Sequence[Any]]:
        """Return values of each field that a config may leave open, its own first."""

    @abstractmethod
    def first_drafts(
        self, states_TF: Tensor, tokens_T: Tensor, embedding_VW: Tensor, head_KW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [R] of a text after which a draft begins, and the logits of its first token, [R, K]."""

    def with_config(self: AnyHead, config: Any) -> AnyHead:
        """Return the same weights with another config of the same shapes."""
        found = copy(self)
        found.config = config
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16, and the maps between the vocabularies."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        return found if self.ids_K is None else {**found, **maps_of(self.ids_K, self.config.vocab_size)}

    @classmethod
    def of(cls: type[AnyHead], config: Any, tensors: Mapping[str, Tensor]) -> AnyHead:
        """Build the network from a config and saved weights, float32.

        Raises:
            ValueError: config and weights do not fit each other; the message names the tensor.
        """
        return network_of(cls, config, tensors)

    def check_target(self, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        """Compare shapes only: :func:`compared` decides about other weights."""
        self.check_shape(target)


class _Tried(NamedTuple):
    """A reading of the config, and where its first drafts agree, bool [R]."""

    changes: Mapping[str, Any]
    config: Any
    agrees_R: Tensor

    @property
    def share(self) -> float:
        return float(self.agrees_R.float().mean())

    def better_than(self, other: "_Tried") -> bool:
        gained = int((self.agrees_R & ~other.agrees_R).sum())
        lost = int((other.agrees_R & ~self.agrees_R).sum())
        return gained - lost > 2 * (gained + lost) ** 0.5

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value}" for name, value in self.changes.items()) or "as the config is read"
        return f"{words}: {100 * self.share:.0f} %"


def tap_readings(config: LayersConfig, num_layers: int) -> dict[str, tuple[Any, ...]]:
    """Values of ``depths`` and ``final_norm``: taps one layer later or earlier, and the last state normed or not."""
    depths = config.taps.of(num_layers)
    if config.taps.final and len(depths) == 1:
        return {"depths": (config.taps.depths, depths)}  # the final state alone: normed, or as the last layer gives it
    moved = (tuple(each + by for each in depths) for by in (1, -1))
    found: dict[str, tuple[Any, ...]] = {
        "depths": (config.taps.depths, *(each for each in moved if min(each) >= 1 and max(each) <= num_layers))
    }
    if any(num_layers in each for each in (depths, *found["depths"])):
        found["final_norm"] = (config.taps.final, not config.taps.final)
    return found


def looked_up(tokens: Tensor, embedding_VW: Tensor) -> tuple[Tensor, Tensor]:
    """Return places of tokens in a table of their own, and that table as float32."""
    ids, places = tokens.unique(return_inverse=True)
    return places, embedding_VW[ids].float()


def scored(n_RW: Tensor, head_KW: Tensor) -> Tensor:
    """Return logits, float32 [R, K]."""
    return F.linear(n_RW.to(head_KW.dtype), head_KW).float()


def probe_tokens(target: LanguageModel) -> list[int]:
    """Return the text that targets read here, in a target's tokens; below ``FEWEST`` it is too short."""
    tokens: list[int] = target.tokenizer.encode(_TEXT)
    return tokens[: min(_TOKENS, target.max_length - 1)]


def compared(head: AnyHead, target: LanguageModel, probe: bool) -> tuple[AnyHead, str]:
    """Return a head with the config that agrees best with the target, and a line about it; none for its own target.

    A head of other weights drafts, too, if it agrees: they may be the same model in another dtype.

    Args:
        probe: False: the head as its config is read.
    Raises:
        MismatchError: no reading of its config agrees; the readings are listed.
    """
    owner, silent = head.config.target_fingerprint, head.config.silent
    said = f"the head has no fingerprint of its target '{head.config.target}': "
    if owner:
        if owner == fingerprint_of(target.source):
            return head, ""
        said, silent = f"the head was trained for other weights, those of '{head.config.target}': ", frozenset()
    tokens = probe_tokens(target) if probe else []
    if len(tokens) < FEWEST:
        return head, f"{said}only its shapes were compared with the target"
    readings = head.readings(target)
    own = {name: values[0] for name, values in readings.items()}
    options = [[(name, each) for each in values] for name, values in readings.items() if name in silent]
    open_ = [dict(pairs) for pairs in itertools.product(*options)]
    stated = [{name: each} for name, values in readings.items() if name not in silent for each in values[1:]]
    wanted = [
        changes
        for changes in (*open_, *stated)
        if not changes.get("final_norm") or target.num_layers in changes.get("depths", own["depths"])
    ]
    num_open = sum(changes in open_ for changes in wanted)
    products = head.rows_per_token * sum(each.numel() for each in head.layers.parameters())
    if products * FEWEST * len(wanted) > _PRODUCTS:
        wanted = wanted[:num_open]  # stated values are kept anyway
    tokens = tokens[: max(FEWEST, int(_PRODUCTS / products / len(wanted)))]
    PHASES.info(f"comparing the head with the target on {len(tokens)} tokens; readings of its config: {len(wanted)}")
    configs = [replace(head.config, **changes) for changes in wanted]
    with torch.inference_mode():
        found = zip(wanted, configs, _agreements(head, configs, target, tokens), strict=True)
        tried = [
            _Tried({name: v for name, v in new.items() if v != own[name]}, config, agrees)
            for new, config, agrees in found
        ]
    first, *others = tried[:num_open]
    chosen = max((each for each in others if each.better_than(first)), key=lambda each: each.share, default=first)
    if max(each.share for each in tried) < LEAST:
        raise MismatchError(
            f"{said}its first drafts agree with '{target.name}' on less than {100 * LEAST:.0f} % of a text, so it is "
            f"of another target or damaged ({'; '.join(map(str, tried))}): name a head of this target, or give "
            "probe=False to draft with it as it is"
        )
    said += f"its first drafts agree with the target's greedy tokens at {100 * chosen.share:.0f} % of a short text"
    if chosen.changes:
        said += f" with {chosen}, which the config leaves open ({first})"
    better = [each for each in tried[num_open:] if each.better_than(chosen)]
    if better:
        best = max(better, key=lambda each: each.share)
        log.warning("the head's config is kept, but it agrees better with the target with %s", best)
        said += f"; the config is kept, but {best} would agree better"
    return head.with_config(chosen.config), said


def _agreements(head: PublishedHead, configs: Sequence[Any], target: LanguageModel, tokens: list[int]) -> list[Tensor]:
    """Where the first drafts of each config agree with the target's greedy tokens."""
    num_layers, dtype = target.num_layers, target.dtype
    cache = target.new_cache(1)
    batch = PackedBatch.of_text(tokens, cache)
    taps = tuple(sorted({depth for config in configs for depth in config.taps.of(num_layers)}))
    output = target.forward(batch, DensePlan(cache, batch), span=Span(0, num_layers, taps=taps))
    best_T, tokens_T = torch.tensor(output.best), torch.tensor(tokens)
    embedding_VW, head_KW = (part(target.model).detach().cpu() for part in (head.embedding_of, head.lm_head_of))
    found = []
    for config in configs:
        depths = config.taps.of(num_layers)
        states_TF = fused_states([output.hidden[each] for each in depths], depths, final_of(config.taps, target), dtype)
        rows_R, logits_RK = head.with_config(config).first_drafts(
            states_TF.float().cpu(), tokens_T, embedding_VW, head_KW
        )
        drafted_R = logits_RK.argmax(-1)
        found.append((drafted_R if head.ids_K is None else head.ids_K[drafted_R]) == best_T[rows_R])
    return found
