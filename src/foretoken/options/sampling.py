"""Sampling parameters of one request, each declared once, with vLLM's names and meanings except where noted.

A new parameter needs one declaration here and its arithmetic in ``core/laws.py``; options/option.py derives the rest.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.plain import reject_unknown_keywords, without_idle
from foretoken.options.option import Option, check_known, declared, documented
from foretoken.options.structured import StructuredOutputs, structure
from foretoken.options.tokens import allowed_ids, processors, text_or_ids, texts, token_ids, token_values

MAX_COMPLETIONS = 16_384
"""Of a prompt: each has a distribution and a history of its own from the beginning."""

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_ELSEWHERE: Mapping[str, str] = _TABLES["elsewhere"]  # what vLLM and its earlier versions have, and where to find it
_UNASKED: Mapping[str, Sequence[Any]] = _TABLES["unasked"]  # values of theirs that ask for nothing


@documented
@dataclass(kw_only=True)
class SamplingParams:
    """How to sample tokens from logits, and when to stop.

    Order of application: logits_processors, logit_bias, penalties, DRY, min_tokens, structured_outputs with bad_words
    and allowed_token_ids, temperature, min_p, top_k, top_p, XTC. Numbers and arrays of numpy and torch are accepted.
    Fields may be changed later, with the same checks; running requests keep the old values.

    Raises:
        ConfigError: a value is out of range; the message names field, value and remedy.
    """

    max_tokens: Annotated[
        int,
        Option(
            "Tokens to generate at most.",
            least=1,
            remedy="use at least one token; 10**9 is as much as the context holds",
            more="More than the context holds is as much as it holds. vLLM's default is 16.",
        ),
    ] = 128
    temperature: Annotated[
        float, Option("0 is greedy decoding.", least=0, remedy="use 0 for greedy decoding", more="vLLM's default is 1.")
    ] = 0.0
    top_p: Annotated[
        float,
        Option("Keep the smallest set of tokens with this mass.", above=0, most=1, remedy="use 1 to keep every token"),
    ] = 1.0
    top_k: Annotated[
        int, Option("Keep the k most probable tokens; 0 and -1 keep all.", least=-1, remedy="use 0 to keep every token")
    ] = 0
    min_p: Annotated[
        float,
        Option(
            "Drop tokens less probable than this share of the best one.",
            least=0,
            most=1,
            remedy="use 0 to keep every token",
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Option(
            "Exclude top choices: how often the best tokens go.",
            least=0,
            most=1,
            remedy="use 0 to keep the best tokens",
            more="With this probability all tokens that reach `xtc_threshold` go but the least probable of them, where "
            "there are several. Applied last, in closed form, so that drafts stay exact. Needs a temperature above 0.",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float, Option("The probability from which `xtc_probability` counts a token as a best one.", least=0, most=1)
    ] = 0.1
    dry_multiplier: Annotated[
        float,
        Option(
            "Don't repeat yourself: penalise tokens that lengthen a repetition; 0: off.",
            least=0,
            most=100,
            remedy="use 0 for none",
            more="Where a token would make a repetition of n earlier tokens longer, its logit is lowered by "
            "multiplier * base^(n - `dry_allowed_length`).",
        ),
    ] = 0.0
    dry_base: Annotated[float, Option("Base of DRY's penalty.", least=1, most=10)] = 1.75
    dry_allowed_length: Annotated[
        int, Option("Tokens of a repetition from which on DRY penalises.", least=1, most=1000)
    ] = 2
    dry_penalty_last_n: Annotated[
        int, Option("Last tokens in which DRY looks for repetitions; 0: none, -1: all.", least=-1)
    ] = 64
    dry_sequence_breakers: Annotated[
        Sequence[str],
        Option(
            "Texts that no repetition of DRY's goes across.",
            convert=texts,
            on_command_line=False,
            more="The last token of each, as the tokenizer splits it after a letter.",
        ),
    ] = ("\n", ":", '"', "*")
    seed: Annotated[
        int | None,
        Option(
            "Fix every random choice; without one, a fresh seed is drawn.",
            least=0,
            most=2**63 - 1,
            remedy="use a non-negative integer below 2**63",
            more="With a temperature above 0 the tokens are the same in any batch, process and number of threads, as "
            "far as the model's logits are. Unless the recipe promises the same stream, draft lengths and exits then "
            "depend on the request's own history instead of on measurements, which may cost some speed, and the "
            "recipe, `max_num_seqs` and `max_rows_per_step` must stay the same.",
        ),
    ] = None
    stop: Annotated[
        str | Sequence[str] | None, Option("End the text before this string.", metavar="TEXT", convert=texts)
    ] = None
    stop_token_ids: Annotated[
        Sequence[int],
        Option(
            "End at this token, besides the model's own end tokens.",
            name="stop-token-id",
            metavar="ID",
            convert=token_ids,
            more="It is in `token_ids`, not in the text.",
        ),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Option("Keep the stop string, or the text of the stop token, at the text's end.", on_command_line=False)
    ] = False
    skip_special_tokens: Annotated[
        bool, Option("Leave special tokens out of the text; they are in `token_ids`.", on_command_line=False)
    ] = True
    repetition_penalty: Annotated[
        float,
        Option(
            "Above 1: less repetition.",
            least=1e-30,
            most=1e30,
            remedy="use 1 for none",
            more="Of prompt and output; positive logits are divided by it, negative ones multiplied (CTRL).",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Option("Subtracted once from the logits of tokens in the output.", least=-2, most=2, remedy="use 0 for none"),
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option("Subtracted for every occurrence in the output.", least=-2, most=2, remedy="use 0 for none")
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Option(
            "Add to a token's logit.",
            metavar="ID=VALUE",
            convert=token_values,
            more="`-inf` forbids the token. Ids may be texts, as in JSON.",
        ),
    ] = None
    logits_processors: Annotated[
        Sequence[Callable[..., Any]] | None,
        Option(
            "Functions that change the logits of a token.",
            convert=processors,
            on_command_line=False,
            over_http=False,
            more="Each is called as f(output_ids, logits) or f(prompt_ids, output_ids, logits), with lists of token "
            "ids and a float32 tensor [vocabulary], and returns such a tensor; a `LogitsProcessor` of transformers is "
            "called as there. It is called for each row of a draft, with the tokens before that row, and for the "
            "draft's own distribution: the result must depend on the arguments alone, which every 64th call checks.",
        ),
    ] = ()
    bad_words: Annotated[
        Sequence[str],
        Option(
            "Texts that are not written.",
            convert=texts,
            on_command_line=False,
            more="The last token of such a text is forbidden, with the text split as the tokenizer splits it "
            "at the beginning of a text or after a space. Another split of the text may still occur.",
        ),
    ] = ()
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Option(
            "No other token is possible.",
            convert=allowed_ids,
            on_command_line=False,
            more="The model's end of text is possible only if it is among them.",
        ),
    ] = None
    min_tokens: Annotated[int, Option("No end before so many tokens.", least=0, remedy="use 0 for none")] = 0
    ignore_eos: Annotated[bool, Option("Go on past the model's own end of text.")] = False
    n: Annotated[
        int,
        Option(
            "Completions of every prompt.",
            least=1,
            most=MAX_COMPLETIONS,
            remedy="ask for at least one completion, for more in several calls",
        ),
    ] = 1
    logprobs: Annotated[
        int | None,
        Option(
            "With --json: the K best log-probabilities.",
            metavar="K",
            least=0,
            most=1000,
            remedy="use None for none",
            over_http=False,
            more="Besides that of the emitted token; from the model's own logits, before temperature, penalties and "
            "filters. Over HTTP as OpenAI has them.",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Option(
            "The same for every token of the prompt but the first.",
            least=0,
            most=1000,
            remedy="use None for none",
            on_command_line=False,
            over_http=False,
            more="It needs the whole prompt's forward, with the logits of every row.",
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Option(
            "Keep only this many tokens from the end of the prompt; -1: as many as fit with max_tokens.",
            least=-1,
            remedy="use None to keep the whole prompt",
            on_command_line=False,
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | Mapping[str, object] | None,
        Option(
            "The form of the text: a JSON schema, a regular expression, a choice or a grammar.",
            convert=structure,
            on_command_line=False,
            more="`StructuredOutputs`, or a mapping of its fields. A text cut by `max_tokens` is the beginning of "
            "one. Not with `ignore_eos` or `min_tokens`: a complete text must be able to end.",
        ),
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        Option(
            "Tokens of the reasoning, after which its end is written; None and -1: no limit.",
            name="reasoning-budget",
            least=-1,
            remedy="use None for no limit",
            more="For models with `<think>` in their chat template. The end comes up to three tokens later where it "
            "would cut a character. It is part of the distribution, so that drafts stay exact.",
        ),
    ] = None
    thinking_budget_message: Annotated[
        str | None, Option("Written before the end that `thinking_token_budget` sets.", name="reasoning-budget-message")
    ] = None
    prediction: Annotated[
        str | Sequence[int] | None,
        Option(
            "What the answer is expected to repeat, such as a file to edit: its tokens are drafts.",
            convert=text_or_ids,
            on_command_line=False,
            more="A text or its token ids. Tokens that differ, or are inserted or left out, cost a few steps without "
            "drafts. The text stays the same. It has no effect with a method that resumes the target's own layers, "
            "with a lossy rule, or where drafts are made ahead.",
        ),
    ] = None

    def __post_init__(self) -> None:
        for each in declared(SamplingParams):
            if (value := getattr(self, each.name)) is not each.default or each.option.convert:
                super().__setattr__(each.name, each.check(value))
        if self.truncate_prompt_tokens == 0:
            raise ConfigError("truncate_prompt_tokens=0 leaves no prompt: keep at least one token, or -1")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}: "
                "lower one or raise the other"
            )
        if self.xtc_probability and self.temperature == 0:
            raise ConfigError(
                f"xtc_probability={self.xtc_probability:g} with temperature=0: greedy decoding takes the best token; "
                "raise the temperature, or leave it out"
            )
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ConfigError(
                f"{name} with structured_outputs: a complete text must be able to end; leave one of them out"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dataclass_fields__
        if name not in known:
            raise ConfigError(f"unknown sampling parameter '{name}': {nearest(name, known)}")
        if len(self.__dict__) < len(known):  # while it is made
            super().__setattr__(name, value)
            return
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
            self.__post_init__()
        except ConfigError:
            self.__dict__.update(before)
            raise

    @property
    def greedy(self) -> bool:
        """True when the distribution is the argmax."""
        return self.temperature == 0.0

    @property
    def repeatable(self) -> bool:
        """True when a seed is to give the same sampled tokens every time."""
        return self.seed is not None and not self.greedy

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return texts("stop", self.stop)

    @property
    def named_tokens(self) -> dict[str, Iterable[int]]:
        """The fields that name tokens by their ids, and these."""
        given = {
            each.name: getattr(self, each.name) for each in declared(SamplingParams) if each.option.convert in _IDS
        }
        if isinstance(self.prediction, tuple):
            given["prediction"] = self.prediction
        return {name: ids for name, ids in given.items() if ids}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "SamplingParams":
        """Build from a mapping; an unknown key is an error that offers the nearest name."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"sampling params must be a mapping of names to values, not {type(values).__name__}")
        values = without_idle(values, _UNASKED)
        check_known(values, cls, "sampling parameter", _ELSEWHERE)
        return cls(**values)

    @staticmethod
    def remedy(name: str) -> str | None:
        """What takes the place of a parameter that people know from elsewhere; None: nothing is known of it."""
        return _ELSEWHERE.get(name)

    def clone(self) -> "SamplingParams":
        """A copy that may be changed by itself."""
        return copy.deepcopy(self)


_IDS = (token_ids, allowed_ids, token_values)

SamplingParams.__init__ = reject_unknown_keywords(SamplingParams.__init__, _ELSEWHERE, _UNASKED)  # type: ignore[method-assign]
