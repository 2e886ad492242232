"""Fields, values and functions of the two checks of form. Data only; ``forms.py`` puts them together."""

# ruff: noqa: SIM905 - lists of words are read as words, not as two hundred pairs of quotes

from __future__ import annotations

from typing import Any, NamedTuple

# fields of a JSON object by the kind of their value
STRING_FIELDS = {
    "name": "Anna Boris Clara David Elena Frank Greta Henry Irene Jonas Karla Louis Marta Norman Olive Peter".split(),
    "city": "Paris London Berlin Madrid Oslo Cairo Lima Tokyo Delhi Rome Vienna Athens Dublin Lisbon Prague".split(),
    "colour": "red blue green yellow white black purple orange pink brown silver golden".split(),
    "animal": "dog cat horse rabbit parrot goat turtle sheep duck hamster".split(),
    "language": "English French German Spanish Italian Polish Arabic Hindi Korean Swedish".split(),
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "material": "wood glass paper steel cotton leather stone plastic wool copper".split(),
    "fruit": "apple pear peach lemon orange cherry plum banana grape melon".split(),
    "shape": "circle square triangle star oval cube ring cone".split(),
    "status": "new open closed ready waiting done late lost".split(),
}
INTEGER_FIELDS = ("age", "count", "price", "year", "height", "weight", "size", "score", "level", "floor", "page", "id")
BOOLEAN_FIELDS = ("active", "paid", "public", "broken", "sold", "clean", "empty", "locked", "visible", "urgent")
LIST_FIELDS = {
    "tags": "old new small large cheap rare soft heavy round plain bright quiet".split(),
    "colours": "red blue green yellow white black purple orange pink brown".split(),
    "fruits": "apple pear peach lemon cherry plum banana grape melon fig".split(),
    "friends": "Anna Boris Clara David Elena Frank Greta Henry Irene Jonas".split(),
    "sizes": "tiny small medium large huge".split(),
    "tools": "hammer saw drill brush knife ruler rope ladder".split(),
}

REQUESTS = (
    "Write a JSON object with {fields}.",
    "Give me a JSON object with {fields}.",
    "Return a JSON object that has {fields}.",
    "Create a JSON object with {fields}. Write only the JSON.",
    "Please write a JSON object with these fields: {fields}.",
    "Answer with a JSON object that has {fields}.",
    "I need a JSON object with {fields}.",
    "Make a JSON object from this: {fields}.",
)
STRING_FORMS = ("{key} {value}", 'the {key} "{value}"', "{key} set to {value}", "the {key} {value}")
INTEGER_FORMS = ("{key} {value}", "the {key} {value}", "{key} equal to {value}", "{key} = {value}")
BOOLEAN_FORMS = ("{key} {value}", "{key} set to {value}", "the flag {key} {value}")
LIST_FORMS = ("{key} as a list of {value}", "the list {key} with {value}", "a list {key} of {value}")


class Function(NamedTuple):
    """A function to ask for: names to choose from, parameters, what it does, and its lines.

    ``{n}`` stands for a small number and ``{w}`` for a word, drawn for each request; parameters are ``{p}``, ``{q}``,
    ``{r}``, named from the group that ``parameters`` gives.
    """

    names: str
    parameters: str
    does: tuple[str, ...]
    body: str


# groups of parameter names: as many names as the function has parameters
PARAMETERS = {
    "number": (("x",), ("n",), ("value",), ("number",), ("a",)),
    "numbers": (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n")),
    "three": (("a", "b", "c"), ("x", "y", "z"), ("first", "second", "third")),
    "list": (("items",), ("values",), ("numbers",), ("data",), ("elements",)),
    "text": (("text",), ("s",), ("word",), ("line",), ("name",)),
    "texts": (("a", "b"), ("first", "second"), ("left", "right"), ("s", "t")),
    "words": (("words",), ("lines",), ("names",), ("strings",), ("texts",)),
    "list_item": (("items", "x"), ("values", "value"), ("numbers", "n"), ("data", "item")),
    "table": (("table",), ("d",), ("mapping",), ("record",)),
    "table_key": (("table", "key"), ("d", "k"), ("mapping", "name"), ("record", "field")),
}

# arguments that tell functions of a group apart; what a function raises at does not count
CALLS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "number": ((0,), (1,), (-3,), (10,), (37,), (2.5,)),
    "numbers": ((7, 2), (2, 7), (3, 3), (-5, 3), (12, 4), (0, 5), (2.5, 2), (-4, -9)),
    "three": ((1, 2, 3), (3, 2, 1), (2, 1, 3), (5, 5, 5), (-1, 4, 2), (2, 7, 2), (4, 4, 9), (9, 1, 9), (3, 1, 5)),
    "list": (([3, 1, 2],), ([5],), ([],), ([2, 2, 4, 7],), ([-1, 0, 10],), ([8, -6, 4, 8, 120],)),
    "text": (("",), ("level",), ("Hello world",), ("  spaced out  ",), ("Banana",), ("x y, z",)),
    "texts": (("ab", "cab"), ("", ""), ("dog", "cat"), ("same", "same"), ("a", "banana"), ("longer", "ab")),
    "words": ((["a", "bcd", "ef"],), (["one"],), ([],), (["Red", "green", "BLUE", "blue"],)),
    "list_item": (([1, 2, 3], 2), ([4, 4, 5], 4), ([], 1), ([1, 2], 9), ([6, 3, 6], 6), (["a", "b"], "b")),
    "table": (({"a": 1, "b": 2},), ({},), ({"x": -3, "y": 4.5},)),
    "table_key": (({"a": 1, "b": 2}, "b"), ({"a": 1}, "z"), ({"x": 0}, "x"), ({}, "a")),
}

FUNCTIONS = (
    Function("add sum_of_two plus total", "numbers", ("returns the sum of {p} and {q}", "adds {p} and {q}"),
             "return {p} + {q}"),
    Function("subtract minus difference take_away", "numbers", ("returns {p} minus {q}", "subtracts {q} from {p}"),
             "return {p} - {q}"),
    Function("multiply product times", "numbers", ("returns the product of {p} and {q}", "multiplies {p} by {q}"),
             "return {p} * {q}"),
    Function("divide quotient ratio", "numbers", ("divides {p} by {q}", "returns {p} divided by {q}"),
             "return {p} / {q}"),
    Function("remainder modulo rest", "numbers", ("returns the remainder of {p} divided by {q}",),
             "return {p} % {q}"),
    Function("power raise_to exponent", "numbers", ("returns {p} to the power of {q}", "raises {p} to the power {q}"),
             "return {p} ** {q}"),
    Function("average mean_of_two middle", "numbers", ("returns the average of {p} and {q}",),
             "return ({p} + {q}) / 2"),
    Function("larger maximum bigger", "numbers", ("returns the larger of {p} and {q}",), "return max({p}, {q})"),
    Function("smaller minimum lesser", "numbers", ("returns the smaller of {p} and {q}",), "return min({p}, {q})"),
    Function("distance gap", "numbers", ("returns the absolute difference of {p} and {q}",),
             "return abs({p} - {q})"),
    Function("is_equal same equals", "numbers", ("returns whether {p} and {q} are equal",), "return {p} == {q}"),
    Function("is_greater exceeds above", "numbers", ("returns whether {p} is greater than {q}",),
             "return {p} > {q}"),
    Function("divides_evenly is_multiple divisible", "numbers", ("returns whether {p} is divisible by {q}",),
             "return {p} % {q} == 0"),
    Function("scaled_sum add_scaled weighted", "numbers", ("returns {p} plus {n} times {q}",),
             "return {p} + {n} * {q}"),
    Function("add_constant increase shift", "number", ("adds {n} to {p}", "returns {p} plus {n}"),
             "return {p} + {n}"),
    Function("decrease reduce_by lower", "number", ("subtracts {n} from {p}", "returns {p} minus {n}"),
             "return {p} - {n}"),
    Function("scale multiply_by enlarge", "number", ("multiplies {p} by {n}", "returns {p} times {n}"),
             "return {p} * {n}"),
    Function("square squared", "number", ("returns the square of {p}", "squares {p}"), "return {p} * {p}"),
    Function("cube cubed", "number", ("returns the cube of {p}",), "return {p} ** 3"),
    Function("half halve", "number", ("returns half of {p}", "halves {p}"), "return {p} / 2"),
    Function("double twice", "number", ("returns twice {p}", "doubles {p}"), "return 2 * {p}"),
    Function("negate opposite", "number", ("returns the negative of {p}", "changes the sign of {p}"), "return -{p}"),
    Function("is_even even", "number", ("returns whether {p} is even", "checks if {p} is even"),
             "return {p} % 2 == 0"),
    Function("is_odd odd", "number", ("returns whether {p} is odd", "checks if {p} is odd"), "return {p} % 2 == 1"),
    Function("is_positive positive", "number", ("returns whether {p} is positive",), "return {p} > 0"),
    Function("is_large is_above over", "number", ("returns whether {p} is greater than {n}",), "return {p} > {n}"),
    Function("is_small is_below under", "number", ("returns whether {p} is less than {n}",), "return {p} < {n}"),
    Function("absolute magnitude", "number", ("returns the absolute value of {p}",),
             "if {p} < 0:\n    return -{p}\nreturn {p}"),
    Function("limit cap clip", "number", ("returns {p}, but at most {n}",),
             "if {p} > {n}:\n    return {n}\nreturn {p}"),
    Function("at_least floor_at raise_up", "number", ("returns {p}, but at least {n}",),
             "if {p} < {n}:\n    return {n}\nreturn {p}"),
    Function("count_up numbers_below upto", "number", ("returns a list of the numbers from 0 to {p} minus 1",),
             "return list(range({p}))"),
    Function("last_digit final_digit", "number", ("returns the last digit of {p}",), "return {p} % 10"),
    Function("sum_of_three add_three total", "three", ("returns the sum of {p}, {q} and {r}",),
             "return {p} + {q} + {r}"),
    Function("volume box_volume", "three", ("returns the product of {p}, {q} and {r}",), "return {p} * {q} * {r}"),
    Function("is_between between in_range", "three", ("returns whether {p} is between {q} and {r}",),
             "return {q} <= {p} <= {r}"),
    Function("largest_of_three max_of_three", "three", ("returns the largest of {p}, {q} and {r}",),
             "return max({p}, {q}, {r})"),
    Function("add_then_multiply combine", "three", ("adds {p} and {q} and multiplies the result by {r}",),
             "return ({p} + {q}) * {r}"),
    Function("total sum_all add_up", "list", ("returns the sum of {p}", "adds up all of {p}"), "return sum({p})"),
    Function("size count_items length", "list", ("returns the number of elements in {p}",), "return len({p})"),
    Function("first_item head", "list", ("returns the first element of {p}",), "return {p}[0]"),
    Function("last_item tail_item", "list", ("returns the last element of {p}",), "return {p}[-1]"),
    Function("take first_few front", "list", ("returns the first {n} elements of {p}",), "return {p}[:{n}]"),
    Function("skip drop_first without_first", "list", ("returns {p} without its first {n} elements",),
             "return {p}[{n}:]"),
    Function("backwards reverse_list flipped", "list", ("returns {p} in reverse order",), "return {p}[::-1]"),
    Function("in_order sort_list ordered", "list", ("returns {p} sorted", "sorts {p}"), "return sorted({p})"),
    Function("largest highest", "list", ("returns the largest element of {p}",), "return max({p})"),
    Function("smallest lowest", "list", ("returns the smallest element of {p}",), "return min({p})"),
    Function("mean average_of", "list", ("returns the average of {p}",), "return sum({p}) / len({p})"),
    Function("add_to_all shift_all", "list", ("adds {n} to every element of {p}",), "return [x + {n} for x in {p}]"),
    Function("scale_all multiply_all", "list", ("multiplies every element of {p} by {n}",),
             "return [x * {n} for x in {p}]"),
    Function("above_limit keep_large filter_large", "list", ("returns the elements of {p} that are greater than {n}",),
             "return [x for x in {p} if x > {n}]"),
    Function("evens only_even keep_even", "list", ("returns the even elements of {p}",),
             "return [x for x in {p} if x % 2 == 0]"),
    Function("squares square_all", "list", ("returns the squares of the elements of {p}",),
             "return [x * x for x in {p}]"),
    Function("unique distinct no_repeats", "list", ("returns the set of the elements of {p}",), "return set({p})"),
    Function("product_of multiply_up", "list", ("returns the product of the elements of {p}",),
             "result = 1\nfor x in {p}:\n    result *= x\nreturn result"),
    Function("contains has includes", "list_item", ("returns whether {q} is in {p}",), "return {q} in {p}"),
    Function("count_of how_often occurrences", "list_item", ("returns how often {q} occurs in {p}",),
             "return {p}.count({q})"),
    Function("position find_index", "list_item", ("returns the index of {q} in {p}",), "return {p}.index({q})"),
    Function("with_item append_to", "list_item", ("returns {p} with {q} added at the end",), "return {p} + [{q}]"),
    Function("shout upper_case loud", "text", ("returns {p} in upper case",), "return {p}.upper()"),
    Function("whisper lower_case quiet", "text", ("returns {p} in lower case",), "return {p}.lower()"),
    Function("reverse mirror reversed_text", "text", ("returns {p} reversed", "reverses {p}"), "return {p}[::-1]"),
    Function("trim strip_spaces clean", "text", ("removes the spaces around {p}",), "return {p}.strip()"),
    Function("repeat echo", "text", ("returns {p} repeated {n} times",), "return {p} * {n}"),
    Function("greet say_to welcome", "text", ('returns "{w} " followed by {p}',), 'return "{w} " + {p}'),
    Function("initial first_letter", "text", ("returns the first character of {p}",), "return {p}[0]"),
    Function("is_palindrome palindrome", "text", ("returns whether {p} reads the same backwards",),
             "return {p} == {p}[::-1]"),
    Function("count_letter letters_in", "text", ('returns how often "{l}" occurs in {p}',), 'return {p}.count("{l}")'),
    Function("begins_with starts", "text", ('returns whether {p} starts with "{w}"',),
             'return {p}.startswith("{w}")'),
    Function("ends finishes_with", "text", ('returns whether {p} ends with "{w}"',), 'return {p}.endswith("{w}")'),
    Function("replace_letter swap_out", "text", ('replaces every "{l}" in {p} with "{k}"',),
             'return {p}.replace("{l}", "{k}")'),
    Function("split_words to_words", "text", ("splits {p} into words", "returns the words of {p}"),
             "return {p}.split()"),
    Function("number_of_words count_words", "text", ("returns the number of words in {p}",),
             "return len({p}.split())"),
    Function("join_texts concatenate glue", "texts", ("joins {p} and {q} with a space between them",),
             'return {p} + " " + {q}'),
    Function("same_length equally_long", "texts", ("returns whether {p} and {q} have the same length",),
             "return len({p}) == len({q})"),
    Function("is_part_of occurs_in", "texts", ("returns whether {p} occurs in {q}",), "return {p} in {q}"),
    Function("sentence join_words", "words", ("joins {p} with spaces",), 'return " ".join({p})'),
    Function("longest longest_word", "words", ("returns the longest of {p}",), "return max({p}, key=len)"),
    Function("lengths word_lengths", "words", ("returns the lengths of {p} as a list",),
             "return [len(x) for x in {p}]"),
    Function("all_upper shout_all", "words", ("returns {p} in upper case as a list",),
             "return [x.upper() for x in {p}]"),
    Function("get_value look_up fetch", "table_key", ("returns the value of {q} in the dictionary {p}",),
             "return {p}[{q}]"),
    Function("get_or_default find_or", "table_key", ("returns the value of {q} in the dictionary {p}, or {n} if it is "
             "missing",), "return {p}.get({q}, {n})"),
    Function("all_keys keys_of", "table", ("returns the keys of the dictionary {p} as a list",),
             "return list({p}.keys())"),
    Function("sum_values total_value", "table", ("returns the sum of the values of the dictionary {p}",),
             "return sum({p}.values())"),
)  # fmt: skip

GREETINGS = "Hello Hi Dear Welcome Goodbye Mr Mrs Thanks".split()
CODE_REQUESTS = (
    "Write a Python function {signature} that {does}.",
    "Write the Python function {signature}. It {does}.",
    "Please write a function {signature} in Python that {does}.",
    "Define a Python function {signature} that {does}.",
    "I need a Python function {signature} that {does}.",
)
