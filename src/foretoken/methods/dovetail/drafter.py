"""Dovetail: decoder blocks after a gate draft a tree from the target's last state, on a separate device.

target's side (here)                    drafting side (remote_head.py), on a lane of lanes.py
states after the final norm  ─ rows ──────────► read, after the earlier rows
requests and their budgets   ─ questions ─────► levels of the tree, each one pass of the head
verify the tree              ◄── tokens ──
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, HiddenLayers, Needs, Offers, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.drafting import learned_part
from foretoken.drafting.feature_heads.drafter import TREE, GrowthOptions
from foretoken.drafting.feature_heads.pending_states import Pending, PendingStates
from foretoken.drafting.learned_part import find
from foretoken.engine.draft_length.confidence import Confidence
from foretoken.engine.executors.worker_thread import split
from foretoken.forward.cache import KVCache
from foretoken.methods.dovetail import costs
from foretoken.methods.dovetail.costs import Affordable, Rate
from foretoken.methods.dovetail.lanes import HERE, PLACES, PROCESS, THREAD, DraftLane, InPlace, InProcess, OnThread
from foretoken.methods.dovetail.network import Dovetail
from foretoken.methods.dovetail.remote_head import EAGER_ROWS, Answerer, Parcel, RemoteHead, TargetFacts, weights_of
from foretoken.methods.dovetail.staging import Staging
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Option

FIXED, MEASURED = "fixed", "measured"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FIXED_NODES, _MOST_NODES = 15, 31  # with the root: 16, as in the paper, and 32, the most rows that are timed
_SLOTS = 1024


class DovetailDrafter(Drafter):
    """Drafts with m decoder blocks over the output of the target's final norm.

    Paper:   arXiv:2412.18934; the tree is EAGLE-2's, arXiv:2406.16858.
    Exact:   trees are point masses, chains carry the q of their samples. Device, dtype and place of the head, its
             faults, and the number of drafted nodes change the proposals, never the output distribution.
    Differs: the number of nodes follows from the measured time of a verification (costs.py), while the paper has a
             fixed 16; the drafting side may be a thread or a process of the CPU; it reads a long prompt while the
             target reads it; batches; chains, if both sides share a device and a thread.

    Attributes:
        lane: connection to the drafting side.
        costs: T(n), with a measured budget.
    """

    name = "dovetail"
    laws: tuple[type[Law], ...] = (PointMass,)
    branches = True
    declared = Declared(
        learned_part="foretoken.methods.dovetail.network:Dovetail",
        variants=(
            Variant(options={"width": 4, "max_depth": 4, "budget": FIXED}),
            Variant(options={"tree": False, "max_depth": 3, "budget": FIXED}, laws=(Sampled,), branches=False),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(GrowthOptions):
        """Options of Dovetail."""

        head: Annotated[str | Path | None, learned_part.FOLDER] = None
        device: Annotated[
            str | None,
            Option("Device of the head; None: the target's, or the CPU without a GPU.", choices=("cpu", "cuda")),
        ] = None
        dtype: Annotated[
            str | None,
            Option("Dtype of the head; None: the target's, or bfloat16 on another device.", choices=tuple(_DTYPES)),
        ] = None
        place: Annotated[
            str,
            Option("Where the head runs: here (the engine's thread), thread (a worker), or process.", choices=PLACES),
        ] = HERE
        budget: Annotated[
            str,
            Option(
                "measured: nodes that are worth their measured verification time on this machine; fixed: "
                "num_speculative_tokens nodes, 15 by default.",
                choices=(MEASURED, FIXED),
            ),
        ] = MEASURED
        tree: Annotated[bool, TREE] = True

    def __init__(self, config: Config, target: LanguageModel) -> None:
        head = find(Dovetail, config.head, target)
        self.options, self.branches = config, config.tree
        self.laws = (PointMass,) if config.tree else (Sampled,)
        taps = head.description.taps
        self.needs = Needs(hidden_layers=HiddenLayers(taps.of(target.num_layers)))
        most = _MOST_NODES if config.budget == MEASURED else _FIXED_NODES
        self.offers = Offers(evidence=(GreedyLaws,), length=most)
        device, dtype = self._device(config, target)
        apart = device != target.device or dtype != target.dtype
        if not config.tree and (config.place == PROCESS or device != target.device):
            raise ConfigError(
                f"tree=false with place={config.place!r} on {device.type}: a chain would have to transfer rows of q: "
                "leave tree on, or draft here on the target's device"
            )
        self._handed = KVCache(0, _SLOTS, target.max_length)  # lengths only: rows that the drafting side has received
        self._received: dict[int, int] = {}  # request -> tokens that the drafting side has received
        self._pending = PendingStates(target, self._handed, taps)
        self._unsettled: dict[int, int] = {}  # bytes of rows sent before a draft was requested
        self._dtype, self._width = dtype, head.config.target_width
        self._confidence, self._rate = Confidence(), Rate()
        self._last: tuple[int, float] | None = None  # last step with drafts: number of requests, start time
        self._tokens = 0
        self.lane = self._lane_for(config, target, head, device, apart=apart)
        self.costs = costs.measure(target) if config.budget == MEASURED else None
        if self.costs is not None:
            times = ", ".join(f"{rows} {seconds * 1e3:.1f}" for rows, seconds in self.costs.points)
            self._say(f"milliseconds of a verification by rows: {times}")

    # ------------------------------------------------------------------ places

    def _device(self, config: Config, target: LanguageModel) -> tuple[torch.device, torch.dtype]:
        device = target.device if config.device is None else torch.device(config.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            self._say("device=cuda: there is no GPU here, the head runs on the CPU")
            device = torch.device("cpu")
        if device.type == target.device.type:
            device = target.device
        if config.dtype is not None:
            return device, _DTYPES[config.dtype]
        return device, target.dtype if device == target.device else torch.bfloat16

    def _lane_for(
        self, config: Config, target: LanguageModel, head: Dovetail, device: torch.device, *, apart: bool
    ) -> DraftLane:
        if config.place == HERE and not apart:
            return InPlace(RemoteHead(config, target, head), None)
        threads = split()[1]
        elsewhere = TargetFacts(
            target.name,
            target.vocab_size,
            target.max_length,
            device,
            self._dtype,
            packed=target.native_decoder is not None and device.type == "cpu" and self._dtype != torch.float16,
        )
        if config.place == THREAD and not apart:
            return OnThread(RemoteHead(config, target, head, eager=True), self._staging(device), threads)
        alone = head.with_rows_of(target.model)

        def here() -> InPlace:
            return InPlace(RemoteHead(config, elsewhere, alone), self._staging(device))

        if config.place == HERE:
            return here()
        if config.place == THREAD:
            return OnThread(RemoteHead(config, elsewhere, alone, eager=True), self._staging(device), threads)
        return InProcess(
            Answerer.made,
            (config, elsewhere, alone.config, weights_of(alone)),
            here=here,
            forgotten=self._forget_all,
            threads=threads,
        )

    def _staging(self, device: torch.device) -> Staging:
        return Staging(self._width, self._dtype, device)

    def _say(self, line: str) -> None:
        self.explanation = "; ".join(filter(None, (self.explanation, line)))

    # ------------------------------------------------------------------ the drafter

    def on_forward(self, features: Sequence[Features]) -> None:
        """Store the target's states; a separate lane may read those of a prompt at once."""
        longer = [each for each in self._pending.receive(features) if each[0].num_rows > EAGER_ROWS]
        if longer and self.lane.concurrent and self.lane.ready():
            parcels = [self._parcel(state, context) for state, context in longer]
            before = self.lane.bytes_moved
            self.lane.read(parcels)
            self._share(self.lane.bytes_moved - before, [each.request_id for each in parcels])

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Send one order for all requests with known rows before the root."""
        asked, limits, parcels = list[Context](), list[Budget](), list[Parcel]()
        ready = self.lane.ready()
        self._begin_step(len(contexts))
        for context, budget in zip(contexts, budgets, strict=True):
            state = self._pending.before_root(context)
            if state is None or not ready or budget.max_nodes < 1:
                continue
            asked.append(context)
            limits.append(self._affordable(budget, len(contexts)))
            if self._received.get(context.request_id, 0) < len(context.tokens):
                parcels.append(self._parcel(state, context))
        if not asked:
            return [NO_DRAFT] * len(contexts)
        before = self.lane.bytes_moved
        found = self.lane.draft(parcels, cast(Any, asked), limits)
        numbers = [context.request_id for context in asked]
        self._share(self.lane.bytes_moved - before, numbers)
        drafts = dict(zip(numbers, found or [NO_DRAFT] * len(asked), strict=True))
        return [self._charged(context.request_id, drafts) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Queue the rows of the root and of accepted nodes for the next draft."""
        self._pending.settle(outcomes)
        self._tokens += sum(len(each.tokens) for each in outcomes)
        for outcome in outcomes:
            self._confidence.learn(outcome.draft, outcome.verdict)
        if isinstance(self.lane, InPlace | OnThread):
            self.lane.remote_head.learn(outcomes)

    def release(self, request_id: int) -> None:
        self._unsettled.pop(request_id, None)
        self._received.pop(request_id, None)
        if self._pending.get(request_id) is not None:
            self._pending.release(request_id)
            self.lane.forget(request_id)

    def close(self) -> None:
        self.lane.close()

    # ------------------------------------------------------------------ messages to the drafting side

    def _parcel(self, state: Pending, context: Context) -> Parcel:
        """Return all pending rows, possibly none, and all new tokens; the drafting side owns them from now on."""
        slot, begin = state.slot, self._handed.lengths[state.slot]
        states_TW = state.take(state.num_rows) if state.num_rows else torch.empty(0, self._width)
        received = self._received.get(context.request_id, 0)
        self._handed.lengths[slot] += len(states_TW)
        self._received[context.request_id] = len(context.tokens)
        return Parcel(context.request_id, begin, states_TW.to(self._dtype), received, tuple(context.tokens[received:]))

    def _affordable(self, budget: Budget, requests: int) -> Budget:
        """Return the budget with minimum node probabilities; a history-only request gets the fixed budget."""
        if self.costs is None:
            return replace(budget, stop_rule=None)
        if budget.history_only:
            return replace(budget, max_nodes=min(budget.max_nodes, _FIXED_NODES), stop_rule=None)
        rate = max(self._rate.of(requests), requests / self.costs.at(requests))
        least = tuple(rate * price for price in self.costs.prices(requests, budget.max_nodes))
        return replace(budget, stop_rule=Affordable(self._confidence.by_tenth(), least), least_reach=least[0])

    def _begin_step(self, requests: int) -> None:
        """Update the rate with the previous step, if it had the same number of drafting requests."""
        now = time.perf_counter()
        if self._last is not None and self._last[0] == requests and self._tokens:
            self._rate.add(requests, self._tokens, now - self._last[1])
        self._last, self._tokens = (requests, now), 0

    def _share(self, moved: int, request_ids: Sequence[int]) -> None:
        """Divide transferred bytes evenly among requests."""
        for place, number in enumerate(request_ids):
            part = moved // len(request_ids) + (place < moved % len(request_ids))
            self._unsettled[number] = self._unsettled.get(number, 0) + part

    def _charged(self, request_id: int, drafts: dict[int, Draft]) -> Draft:
        draft, moved = drafts.get(request_id, NO_DRAFT), self._unsettled.pop(request_id, 0)
        return replace(draft, moved_bytes=moved) if moved else draft

    def _forget_all(self) -> None:
        """Stop drafting for requests with rows on the lost drafting side."""
        self._received.clear()
        for request_id in self._pending.requests:
            self._pending.release(request_id)
