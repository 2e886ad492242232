"""The cost of a step with drafts from an exit: in layers loaded, as published, corrected by steps as they run."""

from dataclasses import dataclass

from foretoken.models.language_model import LanguageModel

_WEIGHT = 1 / 8  # of the last time in a mean
_LATE = 4.0  # a time is at most so many means: whatever else the machine does must not count more


@dataclass(slots=True)
class Costs:
    """Costs of one target's steps, in its layers.

    On a large model, where every pass waits for its weights, time is proportional to the layers loaded. On a small one
    layers may stay in the processor's cache, rows cost something, and so does every call: two factors, 1 until they are
    measured, compare a drafting layer and a verifying pass with those of plain decoding.

    Attributes:
        layers: L.
        head: norm and head, in layers; the paper has 0.
        drafting: the share of the head that drafts are scored by.
        plain_seconds, verifying_seconds: of a pass without and with drafts, means; 0: none was seen.
        layer_seconds: of a layer that drafts, the same.
    """

    layers: int
    head: float
    drafting: float = 1.0
    plain_seconds: float = 0.0
    verifying_seconds: float = 0.0
    layer_seconds: float = 0.0

    @property
    def plain(self) -> float:
        """Of a step without a draft."""
        return self.layers + self.head

    def step(self, exit_layer: int, length: float) -> float:
        """Of one step.

        Args:
            length: drafted tokens; the mean of several steps need not be whole.
        """
        if not length:
            return self.plain
        compared = self.plain_seconds or self.verifying_seconds
        layer = self.layer_seconds * self.plain / compared if self.layer_seconds and compared else 1.0
        verifying = self.verifying_seconds / compared if self.verifying_seconds else 1.0
        return self._drafting(exit_layer, length) * layer + self.plain * verifying

    def drafted(self, exit_layer: int, length: int, seconds: float) -> None:
        """Learn from passes that drafted, one after the other."""
        self.layer_seconds = _mean(self.layer_seconds, seconds / self._drafting(exit_layer, length))

    def passed(self, seconds: float, *, drafts: bool) -> None:
        """Learn from a pass of the whole target."""
        if drafts:
            self.verifying_seconds = _mean(self.verifying_seconds, seconds)
        else:
            self.plain_seconds = _mean(self.plain_seconds, seconds)

    def forget(self) -> None:
        """Another number of requests has other costs."""
        self.plain_seconds = self.verifying_seconds = self.layer_seconds = 0.0

    def _drafting(self, exit_layer: int, length: float) -> float:
        return length * (exit_layer + self.drafting * self.head)


def head_in_layers(target: LanguageModel) -> float:
    """The head in units of one layer, by the parameters read from memory for a token."""
    text = target.config.get_text_config(decoder=True)
    head = target.vocab_size * text.hidden_size
    outside = head if getattr(text, "tie_word_embeddings", False) else 2 * head
    return head / ((target.num_parameters - outside) / target.num_layers)


def _mean(known: float, seconds: float) -> float:
    return known + _WEIGHT * (min(seconds, _LATE * known) - known) if known else seconds
