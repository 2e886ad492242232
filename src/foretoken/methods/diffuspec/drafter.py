"""DiffuSpec: one pass fills a lattice of the next tokens; a path through it is searched or sampled, then verified.

temperature 0     prune; search the best path or the best tree (search.py)                           a point mass
above             sample a token per slot, q_i(x) ~ l_i(x)^balance p_ng(x | u, v)^(1-balance)        Sampled
`draw`: false     search the best path above temperature 0, too                                      a point mass
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from foretoken import zoo
from foretoken.core.draft import NO_DRAFT, Draft, Law, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.files import home_expanded
from foretoken.core.needs import Declared, Offers, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome, Verifier
from foretoken.core.siblings import draw_siblings
from foretoken.core.threads import threads_for
from foretoken.core.tree import EMPTY_TREE, ROOT
from foretoken.drafting.draft_builder import DraftBuilder, check_numbers
from foretoken.drafting.learned_part import find, folder_of
from foretoken.methods.diffuspec.block import BlockLattices
from foretoken.methods.diffuspec.lattice import Lattice, LatticeNetwork
from foretoken.methods.diffuspec.masked import MaskedLattices
from foretoken.methods.diffuspec.network import MOST_SLOTS, BlockNetwork
from foretoken.methods.diffuspec.search import Finder
from foretoken.methods.diffuspec.trigram import FILE, Trigram
from foretoken.methods.diffuspec.verifier import SlotLaws
from foretoken.models.language_model import LanguageModel, Output
from foretoken.options.option import Checked, Option

_MASKED_SLOTS = 8  # default number of slots of a masked checkpoint
RHO = 0.5  # of the adaptive length
_MASKED = "zoo:diffusion"  # default for zoo models without a block network


@dataclass(slots=True)
class AdaptiveLength:
    """The paper's adaptive length: as long as usual before an end token, longer while drafts are accepted.

        gen  <-  (1 - rho) gen + rho L_gen    L_gen  tokens before the first end token of the best tokens of all slots
        acc  <-  (1 - rho) acc + rho L_acc    L_acc  accepted draft tokens
        k    <-  clip(floor(gen) + delta [acc >= gen], k_min, k_max)            gen_0 = acc_0 = 0, k_1 = k_max

    Paper: DiffuSpec, arXiv:2510.02358, section 4.3.

    Attributes:
        least, most: k_min and k_max.
        step: delta.
    """

    least: int
    most: int
    step: int
    generated: float = 0.0
    accepted: float = 0.0
    current: int = 0

    def __post_init__(self) -> None:
        self.current = self.current or self.most

    def learn(self, generated: int, accepted: int) -> None:
        """Update the averages with one round.

        Args:
            generated: L_gen, of the lattice before the search.
            accepted: L_acc.
        """
        self.generated += RHO * (generated - self.generated)
        self.accepted += RHO * (accepted - self.accepted)
        wanted = math.floor(self.generated) + self.step * (self.accepted >= self.generated)
        self.current = min(self.most, max(self.least, wanted))


class DiffuSpecDrafter(Drafter):
    """Drafts a whole block in one pass, as a path, a tree or a sampled path through a lattice.

    Paper:   DiffuSpec, arXiv:2510.02358: lattice, path search (4.2), adaptive length (4.3); the block network follows
             DFlash, arXiv:2602.06036 (network.py).
    Exact:   at temperature 0, paths and trees are point masses. Above it, a path is sampled slot by slot from a
             distribution that is normalised over all scored tokens; the draft carries that distribution (Sampled).
             Lossless under any lossless verifier of these draft kinds.
    Differs: the paper verifies the searched path by min(1, p/q), as if the path had been sampled from the lattice,
             which is biased; the verifier `diffuspec` does the same (verifier.py). With other verifiers a path is
             sampled before the test by p/q, from an unpruned distribution. By default the network reads the
             target's hidden states. Trees and batches are supported. The adaptive controller sets the length unless
             ``length`` is "adl"; the bounds and the step of adl suit blocks of 8 tokens, not of 20 to 30. An end
             token stays a candidate only if it is ranked.
    """

    name = "diffuspec"
    laws: tuple[type[Law], ...] = (Sampled,)
    branches = True
    declared = Declared(
        learned_part="foretoken.methods.diffuspec.network:BlockNetwork",
        variants=(
            Variant(options={"tree": False}, branches=False),
            Variant(options={"tree": True}, laws=(PointMass,), branches=True),
            Variant(options={"tree": False, "draw": False}, laws=(PointMass,), branches=False),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of DiffuSpec."""

        head: Annotated[
            str | Path | None,
            Option(
                "A block network (foretoken train diffuspec); None: `diffuspec` in the folder of the target's "
                "weights, unless model is given."
            ),
        ] = None
        model: Annotated[
            str | None,
            Option(
                "A masked diffusion checkpoint that drafts instead: zoo:diffusion, a folder or a hub id, in the layout "
                "of Dream, LLaDA or a masked language model of transformers; None: zoo:diffusion for zoo models "
                "without a block network."
            ),
        ] = None
        slots: Annotated[
            int | None,
            Option(
                "Most tokens of a pass; None: the block network's number, or 8 for a checkpoint.",
                least=1,
                most=MOST_SLOTS,
            ),
        ] = None
        tree: Annotated[
            bool | None,
            Option(
                "Search the best tree of the lattice instead of a path, at every temperature; None: at temperature 0 "
                "only, and only if the verifier accepts trees."
            ),
        ] = None
        draw: Annotated[
            bool | None,
            Option(
                "Sample a path above temperature 0; false: search it there, too, as a point mass; None: sample, "
                "unless the verifier is `diffuspec`, which tests searched paths."
            ),
        ] = None
        beam: Annotated[int, Option("Paths that the beam search keeps.", least=1, most=64)] = 3
        mass: Annotated[
            float, Option("Keep the fewest best tokens of a slot with this total probability.", least=0, most=1)
        ] = 0.8
        candidates: Annotated[int, Option("Most tokens of a slot to consider.", least=1, most=256)] = 15
        trigram: Annotated[
            str | Path | None,
            Option(
                "A trigram model (foretoken train diffuspec writes one); None: the one in the block network's folder, "
                "if any, and that of zoo:base for zoo:diffusion; 'none': no trigram model."
            ),
        ] = None
        balance: Annotated[
            float, Option("Weight of the lattice against the trigram model; 1: lattice only.", least=0, most=1)
        ] = 0.5
        length: Annotated[
            str, Option("controller: adaptive length; adl: the paper's rule.", choices=("controller", "adl"))
        ] = "controller"
        least: Annotated[int, Option("Shortest draft of adl.", least=1, most=MOST_SLOTS)] = 2
        step: Annotated[int, Option("Tokens that adl adds while acceptance keeps up.", least=0, most=MOST_SLOTS)] = 2
        context: Annotated[
            int | None,
            Option(
                "Most tokens that a checkpoint reads; None: its training length, if its config has one.",
                least=2,
                most=1 << 20,
            ),
        ] = None

        def check_together(self) -> None:
            if self.model is not None and self.head is not None:
                raise ConfigError(f"model={self.model!r} and head={self.head!r}: one network drafts; leave one out")
            if self.model is None and self.context is not None:
                raise ConfigError(
                    f"context={self.context!r} applies to a masked checkpoint: give model, or leave it out"
                )

    @classmethod
    def settle(cls, config: Config, verifier: Verifier | None) -> Config:
        if verifier is None:
            return config
        if verifier.needs.evidence is SlotLaws:
            if config.draw:
                raise ConfigError(
                    f"draw=True with verifier='{verifier.name}', which is for searched paths: leave one of them out"
                )
            config = replace(config, draw=False)
        return replace(config, tree=False) if config.tree is None and not verifier.trees else config

    def __init__(self, config: Config, target: LanguageModel) -> None:
        self.config = config
        self.branches = config.tree is not False
        self._searches = config.draw is False
        self.laws = (PointMass,) if config.tree or self._searches else (Sampled,)
        self._network, beside = self._found(target)
        self.needs = self._network.needs
        self._slots = min(config.slots or self._network.slots, self._network.slots)
        self.offers = Offers(
            evidence=(SlotLaws,) if self._searches else (), length=self._slots if config.length == "adl" else None
        )
        self._trigram = self._grams(beside, target)
        self._finder = Finder(
            mass=config.mass,
            candidates=config.candidates,
            beam=config.beam,
            balance=config.balance,
            trigram=self._trigram,
        )
        self._lengths: dict[int, AdaptiveLength] = {}
        self._wrote: dict[int, int] = {}  # request -> tokens before the first end of its last lattice's best tokens

    def _found(self, target: LanguageModel) -> tuple[LatticeNetwork, Path | None]:
        """Return the network, and the folder that may contain its trigram model."""
        config, model = self.config, self.config.model
        own = folder_of(target.source) / BlockNetwork.algorithm
        if not model and not config.head and not BlockNetwork.lies_in(own) and zoo.drafts_for(_MASKED, target.name):
            model = _MASKED
        if model is not None:
            slots = config.slots or _MASKED_SLOTS
            masked = MaskedLattices(model, target, slots=slots, top=config.candidates, context=config.context)
            return masked, zoo.path("base") / BlockNetwork.algorithm if model == _MASKED else None
        network = find(BlockNetwork, config.head, target)
        if config.slots is not None and config.slots > network.config.slots:
            raise ConfigError(f"slots={config.slots}: the block network has {network.config.slots}")
        beside = home_expanded(config.head) if config.head else own
        return BlockLattices(network, target, top=config.candidates), beside

    def _grams(self, beside: Path | None, target: LanguageModel) -> Trigram | None:
        """Load the trigram model of the config, or the one in the network's folder."""
        given = self.config.trigram
        if given == "none" or self.config.balance == 1:
            return None
        if given is not None:
            path = home_expanded(given)
            return Trigram.load(path / FILE if path.is_dir() else path, target.vocab_size)
        if beside is None or not (beside / FILE).is_file():
            return None
        return Trigram.load(beside / FILE, target.vocab_size)

    # ------------------------------------------------------------------ the protocol

    def on_forward(self, features: Sequence[Features]) -> None:
        self._network.on_forward(features)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Run one pass of the network for all requests; then search or sample each draft."""
        builders = [DraftBuilder(*each) for each in zip(contexts, budgets, strict=True)]
        active = [
            place
            for place, (draft, budget) in enumerate(zip(builders, budgets, strict=True))
            if budget.max_nodes > 0 and budget.max_depth > 0 and draft.pays(1.0, 1.0)
        ]
        drafts = [NO_DRAFT] * len(contexts)
        # adl needs the best tokens of all slots
        slots = [self._slots if self.config.length == "adl" else budgets[place].max_depth for place in active]
        lattices = self._network.lattices([contexts[place] for place in active], slots)
        for place, lattice in zip(active, lattices, strict=True):
            if lattice is not None:
                drafts[place] = self._draft(builders[place], lattice)
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._network.observe(outcomes)
        for outcome in outcomes:
            rule, wrote = self._lengths.get(outcome.request_id), self._wrote.pop(outcome.request_id, None)
            if rule is not None and wrote is not None and len(outcome.draft):
                rule.learn(wrote, len(outcome.verdict.path))

    def release(self, request_id: int) -> None:
        self._network.release(request_id)
        self._lengths.pop(request_id, None)
        self._wrote.pop(request_id, None)

    # ------------------------------------------------------------------ drafts

    def _draft(self, draft: DraftBuilder, lattice: Lattice) -> Draft:
        slots = min(draft.budget.max_depth, lattice.slots, self._allowed(draft.context, lattice))
        greedy = draft.context.params.greedy
        if self.config.tree or (self.branches and greedy):
            self._find(draft, lattice, slots, tree=True)
        elif greedy or self._searches:
            self._find(draft, lattice, slots, tree=False)
        else:
            with threads_for(slots * lattice.logits_kC.shape[-1]):
                self._draw(draft, lattice, slots)
        finished = draft.finish(Sampled)
        if draft.budget.evidence is SlotLaws and not greedy and len(finished):
            return replace(finished, evidence=_laws_of(draft, lattice))
        return finished

    def _allowed(self, context: Context, lattice: Lattice) -> int:
        """Return the maximum length of the draft."""
        if self.config.length != "adl":
            return self._slots
        found = self._lengths.get(context.request_id)
        if found is None:
            least = min(self.config.least, self._slots)
            found = self._lengths[context.request_id] = AdaptiveLength(least, self._slots, self.config.step)
        best = lattice.output.best[lattice.first : lattice.first + lattice.slots]
        ends = (place for place, token in enumerate(best) if token in context.stop_ids)
        self._wrote[context.request_id] = min(next(ends, self._slots), found.current)
        return found.current

    def _judged(self, draft: DraftBuilder, lattice: Lattice, slots: int) -> tuple[Lattice, int]:
        """Return the lattice under the request's distribution at its root, and the number of slots with
        nonzero probabilities.
        """
        context = draft.context
        if not context.laws.trivial:
            raw_kC, columns = lattice.logits_kC[:slots], lattice.output.columns
            processed_kC = context.laws.process(raw_kC, EMPTY_TREE, [ROOT] * slots, columns)
            lattice = Lattice(Output.of(processed_kC, top=lattice.top, columns=columns), 0, slots)
        for slot in range(slots):
            share = lattice.ranked(slot)[1][0]
            if share != share:  # the request allows none of the scored tokens
                check_numbers(lattice.logits_kC[slot : slot + 1], self._network.name)
                return lattice, slot
        return lattice, slots

    def _find(self, draft: DraftBuilder, lattice: Lattice, slots: int, *, tree: bool) -> None:
        """Add the best path or the best tree, while another node pays."""
        lattice, slots = self._judged(draft, lattice, slots)
        context, budget = draft.context, draft.budget
        found = self._finder.nodes(lattice, slots, _past(context), context.stop_ids, most=budget.max_nodes, tree=tree)
        for node in found:
            chance = math.exp(node.log)
            if len(draft.tokens) >= budget.max_nodes or not draft.pays(draft.reach_of(node.parent), chance):
                return
            draft.add(node.token, node.parent, chance, 0)

    def _draw(self, draft: DraftBuilder, lattice: Lattice, slots: int) -> None:
        """Sample slot by slot. The earlier tokens of the path determine the distribution; the distribution alone
        determines whether to sample at all.
        """
        columns, parent = lattice.output.columns, ROOT
        logits_kC, past = lattice.logits_kC[:slots].float(), _past(draft.context)
        balance = self.config.balance if self._trigram is not None else 1.0
        never_kC = logits_kC == -torch.inf
        if balance < 1:
            logits_kC = logits_kC.log_softmax(-1).masked_fill(never_kC, 0.0) * balance
        for slot in range(slots):
            logits_1C = logits_kC[slot : slot + 1]
            if self._trigram is not None and balance < 1:
                u, v = (*past, *draft.tokens)[-2:]
                fluent_C = self._trigram.row(u, v).to(logits_1C.device)
                if columns is not None:
                    fluent_C = fluent_C[columns.ids_C]
                logits_1C = logits_1C + (1 - balance) * fluent_C.log()
                logits_1C = logits_1C.masked_fill(never_kC[slot], -torch.inf)
            q_C = torch.softmax(draft.process(logits_1C, columns)[0].float(), dim=-1)
            # the probability that an independent sample from q agrees, as in drafters/draft_model.py
            confidence = float((q_C * q_C).sum()) ** 0.5
            if confidence != confidence:
                check_numbers(lattice.logits_kC[slot : slot + 1], self._network.name)
                return
            if len(draft.tokens) >= draft.budget.max_nodes or not draft.pays(draft.reach_of(parent), confidence):
                return
            (token,) = draw_siblings(Sampled, q_C, 1, draft.context.streams, columns)
            parent = draft.add(token, parent, confidence, draft.keep(q_C, columns))
            draft.frontier = [parent]


def _laws_of(draft: DraftBuilder, lattice: Lattice) -> SlotLaws:
    """Return the distribution of each slot given the path's history; the paper treats the path as sampled from these
    distributions.
    """
    columns, rows = lattice.output.columns, []
    for slot in range(len(draft.tokens)):
        draft.frontier = [slot - 1] if slot else [ROOT]
        logits_1C = draft.process(lattice.logits_kC[slot : slot + 1].float(), columns)
        rows.append(torch.softmax(logits_1C[0].float(), dim=-1))
    return SlotLaws(Sampled(torch.stack(rows), tuple(range(len(rows))), columns))


def _past(context: Context) -> tuple[int, int]:
    """Return the last two tokens of the text; a single token is repeated."""
    tokens = context.tokens
    return tokens[max(0, len(tokens) - 2)], tokens[-1]
