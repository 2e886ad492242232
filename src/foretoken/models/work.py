"""How much arithmetic forwards are, counted from sizes: two operations for every parameter that a row meets.

    a row that goes through a layer    2 x the parameters of a layer's matrices; of experts, those that are active
    a row that is scored               2 x the parameters of the head

Left out: attention's products with keys and values (they grow with the context), norms and activations, the embedding
(a look-up), and the savings of a sparse plan. So the count depends on rows and model size only, and not on the
machine.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.forward.stored_embedding import StoredEmbedding

_EXPERTS = ".experts."
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters that a row meets.

    Attributes:
        layer: in one layer, the mean over layers.
        head: in the head.
    """

    layer: float
    head: int

    def flops(self, layer_rows: int, scored_rows: float) -> float:
        """Of so many rows times layers, and so many scored rows."""
        return 2.0 * (self.layer * layer_rows + self.head * scored_rows)


def sizes(model: Any) -> Sizes:
    """The sizes of a causal language model of transformers with unmodified weights."""
    text = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    apart = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    quantised = _quantised(model)
    scored = 0
    if isinstance(head, QuantisedLinear):
        scored = quantised.pop(head)[1]
    elif head is not None:
        apart.add(id(head.weight))  # perhaps the embedding's
        scored = head.weight.numel()
    share = _active_share(text)
    dense = [
        (name, each.numel()) for name, each in model.named_parameters() if each.dim() > 1 and id(each) not in apart
    ]
    layers = sum(count * (share if _EXPERTS in name else 1.0) for name, count in (*dense, *quantised.values()))
    return Sizes(layers / max(1, text.num_hidden_layers), scored)


def num_parameters(model: Any) -> int:
    """How many numbers a model has learned; a head that is the embedding, too, counts once."""
    quantised = _quantised(model)
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "tie_word_embeddings", False):  # the text parts of a few wrappers do not say
        quantised.pop(model.get_output_embeddings(), None)
    numbers = sum(each.numel() for each in model.parameters()) + sum(count for _, count in quantised.values())
    table = model.get_input_embeddings()
    return numbers + (table.num_embeddings * table.embedding_dim if isinstance(table, StoredEmbedding) else 0)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a forward reads: all but an embedding table that is not also the head."""
    table, head = model.get_input_embeddings()._parameters.get("weight"), model.get_output_embeddings()
    looked_up = isinstance(head, QuantisedLinear) or head is None or head.weight is not table
    plain = sum(each.nbytes for each in model.parameters() if each is not table or not looked_up)
    coded = [module.quantised for module in model.modules() if isinstance(module, QuantisedLinear)]
    for module in model.modules():
        if isinstance(module, QuantisedExperts):
            coded += [weight for pair in module.weights for weight in pair]
    return plain + sum(each.num_bytes for each in coded)


def _quantised(model: Any) -> dict[Any, tuple[str, int]]:
    """The name of each quantised layer, or of all experts of one, and the elements of its weights."""
    found: dict[Any, tuple[str, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            found[module] = name, module.out_features * module.in_features
        elif isinstance(module, QuantisedExperts):
            found[module] = f"{name}.", 3 * module.num_experts * module.width * module.channels
    return found


def _active_share(text: Any) -> float:
    """Of a layer's experts, the share that one row goes through."""
    active = getattr(text, "num_experts_per_tok", None)
    count = next((found for name in _NUM_EXPERTS if (found := getattr(text, name, None))), None)
    return active / count if active and count else 1.0
