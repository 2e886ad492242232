"""The texts of the word problems, and the words that fill them. Data only; read ``arithmetic.py`` for the notation."""

# ruff: noqa: SIM905 - lists of words are read as words, not as two hundred pairs of quotes

from __future__ import annotations

HE = ("he", "his", "him")
SHE = ("she", "her", "her")

MEN = (
    "Tom Ben Sam Omar Leo Max Jack Luis Ali Noah Ivan Peter Paul Adam Eric Felix Hugo Karl Marco Nick Oscar Philip "
    "Ryan Simon Victor Walter David Daniel James John Robert Frank George Henry Kevin Mark Carlos Diego Ahmed Hiro"
).split()
WOMEN = (
    "Maria Anna Lucy Emma Sara Nina Olga Rosa Julia Clara Diana Ella Fatima Grace Hannah Ida Jane Kate Laura Mona "
    "Paula Rachel Sofia Tina Vera Wendy Zoe Amy Beth Carol Eva Helen Lena Megan Nora Priya Yuki Alice Linda Susan"
).split()

THINGS = (
    ("marble", "marbles"), ("apple", "apples"), ("book", "books"), ("sticker", "stickers"), ("pencil", "pencils"),
    ("coin", "coins"), ("stamp", "stamps"), ("card", "cards"), ("shell", "shells"), ("button", "buttons"),
    ("cookie", "cookies"), ("orange", "oranges"), ("egg", "eggs"), ("toy car", "toy cars"), ("balloon", "balloons"),
    ("bead", "beads"), ("muffin", "muffins"), ("peach", "peaches"), ("pear", "pears"), ("lemon", "lemons"),
    ("nut", "nuts"), ("rose", "roses"), ("ribbon", "ribbons"), ("crayon", "crayons"), ("postcard", "postcards"),
    ("sandwich", "sandwiches"), ("doughnut", "doughnuts"), ("candle", "candles"), ("bottle", "bottles"),
    ("cupcake", "cupcakes"), ("ticket", "tickets"), ("badge", "badges"), ("key ring", "key rings"),
    ("potato", "potatoes"), ("tomato", "tomatoes"), ("notebook", "notebooks"), ("photo", "photos"),
    ("ball", "balls"), ("game", "games"), ("hat", "hats"), ("pie", "pies"), ("tile", "tiles"), ("brick", "bricks"),
    ("stone", "stones"), ("flower", "flowers"), ("letter", "letters"), ("magazine", "magazines"), ("kite", "kites"),
)  # fmt: skip
BOXES = (
    ("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("jar", "jars"), ("crate", "crates"), ("tray", "trays"),
    ("packet", "packets"), ("drawer", "drawers"), ("bucket", "buckets"), ("bowl", "bowls"), ("pot", "pots"),
    ("carton", "cartons"), ("case", "cases"), ("bin", "bins"),
)  # fmt: skip
COLOURS = "red blue green yellow white black purple orange pink brown".split()
VEHICLES = ("bus", "train", "ferry", "boat", "tram")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

# (the problem, then its steps in order; the result of the last is asked)
ONE_STEP = (
    (
        "{Name} has {a} {things}. {He} [buys|gets|finds|receives|is given] {b} more. How many {things} does {he} have "
        "[now|in all|altogether]?",
        "{Name} starts with {a} {things} and gets {b} more. {a} + {b} = {x}.",
    ),
    (
        "{Name} has {a} {things}. {He} [gives {b} of them to {Other}|gives {Other} {b} of the {things}]. How many "
        "{things} does {Name} have [left|now]?",
        "{Name} starts with {a} {things} and gives away {b}. {a} - {b} = {x}.",
    ),
    (
        "There [are|were] {a} {things} in a {box}. {Name} [takes out|removes] {b} {things}. How many {things} are "
        "[left|still] in the {box}?",
        "There are {a} {things} and {b} are taken out. {a} - {b} = {x}.",
    ),
    (
        "{Name} has {a} {boxes} of {things}. [Each {box} holds {b} {things}|There are {b} {things} in each {box}]. How "
        "many {things} does {he} have [in total|altogether|in all]?",
        "There are {a} {boxes} with {b} {things} each. {a} * {b} = {x}.",
    ),
    (
        "{Name} [shares|divides|splits] {a} {things} equally [among|between] {b} friends. How many {things} does each "
        "friend get?",
        "{a} {things} are shared by {b} friends. {a} / {b} = {x}.",
    ),
    (
        "{Name} has {a} {things} and {Other} has {b} {things}. How many {things} do they have [together|in total]?",
        "Together they have the {things} of both. {a} + {b} = {x}.",
    ),
    (
        "{Name} has {a} {things}. {Other} has {b} {things}. How many more {things} does {Name} have than {Other}?",
        "{Name} has {a} {things} and {Other} has {b}. {a} - {b} = {x}.",
    ),
    (
        "{Name} [wants|needs|is trying] to collect {a} {things}. {He} has {b} {things} so far. How many more {things} "
        "does {he} need?",
        "{Name} needs {a} {things} and has {b}. {a} - {b} = {x}.",
    ),
    (
        "{Name} has {a} {things} and {c} {others}. {He} [loses|sells|gives away|breaks] {b} of the {things}. How many "
        "{things} does {he} have left?",
        "{Name} starts with {a} {things} and {b} are gone. {a} - {b} = {x}.",
    ),
    (
        "One {thing} costs ${b}. {Name} buys {a} {things}. How [much|many dollars] does {he} [pay|spend]?",
        "{a} {things} cost ${b} each. {a} * {b} = {x}.",
    ),
    (
        "{Name} [paid|spent] ${a} for {b} {things}, all at the same price. How much did one {thing} cost?",
        "${a} is paid for {b} {things}. {a} / {b} = {x}.",
    ),
    (
        "{Name} had some {things}. After [giving {b} to {Other}|losing {b} of them], {he} has {a} left. How many "
        "{things} did {Name} have [at first|in the beginning]?",
        "{Name} has {a} {things} left, and {b} are gone. {a} + {b} = {x}.",
    ),
    (
        "After {Name} [bought|found|received] {b} more {things}, {he} had {a} {things}. How many {things} did {he} "
        "have [before|at first]?",
        "{Name} has {a} {things} and {b} of them are new. {a} - {b} = {x}.",
    ),
    (
        "{Name} [reads|writes|types] {a} pages [a|every|each] day. How many pages does {he} get through in {b} days?",
        "It is {a} pages a day for {b} days. {a} * {b} = {x}.",
    ),
    (
        "{Name} [plants|arranges] {a} flowers in {b} equal rows. How many flowers are in each row?",
        "{a} flowers stand in {b} rows. {a} / {b} = {x}.",
    ),
    (
        "{Name} packs {a} {things} into {boxes}. {b} {things} go into each {box}. How many {boxes} does {he} need?",
        "{a} {things} are packed {b} to a {box}. {a} / {b} = {x}.",
    ),
    (
        "{Name} has {a} {things}. {Other} has [twice as many|2 times as many]. How many {things} does {Other} have?",
        "{Other} has twice {a} {things}. {a} * 2 = {x}.",
    ),
    (
        "{Name} has {a} {things}. {Other} has half as many. How many {things} does {Other} have?",
        "{Other} has half of {a} {things}. {a} / 2 = {x}.",
    ),
    (
        "There are {a} boys and {b} girls [in a school choir|at a party|on a bus|in a club]. How many children are "
        "there?",
        "The boys and the girls are counted together. {a} + {b} = {x}.",
    ),
    (
        "A {vehicle} has {a} passengers. {b} of them get off. How many passengers are [left|still on board]?",
        "There are {a} passengers and {b} get off. {a} - {b} = {x}.",
    ),
    (
        "{Name} has {a} {things}. {b} of them are {colour} and the rest are {tint}. How many {things} are {tint}?",
        "Of {a} {things}, {b} are {colour}. {a} - {b} = {x}.",
    ),
    (
        "{Name} is {a} years old. {Other} is {b} years older. How old is {Other}?",
        "{Other} is {b} years older than {a}. {a} + {b} = {x}.",
    ),
    (
        "{Name} sold {a} {things} on {Day} and {b} {things} on {Another}. How many {things} did {he} sell on the two "
        "days?",
        "The {things} of the two days are added. {a} + {b} = {x}.",
    ),
    (
        "There are {a} {boxes} and {b} {things} in every {box} at {Name}'s shop. {Name} also sells {c} {others}. How "
        "many {things} are there?",
        "There are {a} {boxes} with {b} {things} each. {a} * {b} = {x}.",
    ),
)

TWO_STEPS = (
    (
        "{Name} has {a} {things}. {He} [buys|finds|gets] {b} more and then [gives {c} to {Other}|loses {c} of them]. "
        "How many {things} does {Name} have [now|left]?",
        "{Name} starts with {a} {things} and gets {b} more. {a} + {b} = {x}.",
        "Then {c} are gone. {x} - {c} = {y}.",
    ),
    (
        "{Name} has {a} {boxes} with {b} {things} in each {box}. {He} [sells|uses|gives away] {c} {things}. How many "
        "{things} are left?",
        "There are {a} {boxes} with {b} {things} each. {a} * {b} = {x}.",
        "Then {c} are gone. {x} - {c} = {y}.",
    ),
    (
        "{Name} picks {a} {things} in the morning and {b} in the afternoon. {He} gives {c} {things} to {Other}. How "
        "many {things} does {he} have left?",
        "{Name} picks {a} and {b} {things}. {a} + {b} = {x}.",
        "Then {c} are given away. {x} - {c} = {y}.",
    ),
    (
        "{Name} has {a} {boxes} of {b} {things} and {c} loose {things}. How many {things} does {he} have "
        "[altogether|in total]?",
        "There are {a} {boxes} with {b} {things} each. {a} * {b} = {x}.",
        "With the loose ones there are {c} more. {x} + {c} = {y}.",
    ),
    (
        "{Name} has {a} {things}. {He} [loses|uses|gives away] {b} and [puts|packs] the rest equally into {c} "
        "{boxes}. How many {things} are in each {box}?",
        "{Name} starts with {a} {things} and {b} are gone. {a} - {b} = {x}.",
        "The rest goes into {c} {boxes}. {x} / {c} = {y}.",
    ),
    (
        "{Name} has {a} {things} and {Other} has {b} {things}. They [share|divide] all of them equally among {c} "
        "friends. How many {things} does each friend get?",
        "Together they have the {things} of both. {a} + {b} = {x}.",
        "{c} friends share them. {x} / {c} = {y}.",
    ),
    (
        "{Name} has {a} {things}. {Other} has {b} more {things} than {Name}. How many {things} do they have together?",
        "{Other} has {b} more than {a}. {a} + {b} = {x}.",
        "Together they have the {things} of both. {a} + {x} = {y}.",
    ),
    (
        "{Name} has {a} {things}. {Other} has {b} fewer {things} than {Name}. How many {things} do they have in all?",
        "{Other} has {b} fewer than {a}. {a} - {b} = {x}.",
        "Together they have the {things} of both. {a} + {x} = {y}.",
    ),
    (
        "{Name} [made|collected|sold] {a} {things} on {Day} and [twice as many|2 times as many] on {Another}. How many "
        "{things} is that [in total|altogether]?",
        "On {Another} it was twice {a}. {a} * 2 = {x}.",
        "Both days are added. {a} + {x} = {y}.",
    ),
    (
        "{Name} [sold|counted|packed] {a} {things} on {Day} and half as many on {Another}. How many {things} is that "
        "[in total|altogether]?",
        "On {Another} it was half of {a}. {a} / 2 = {x}.",
        "Both days are added. {a} + {x} = {y}.",
    ),
    (
        "{Name} has ${a}. {He} buys {b} {things} that cost ${c} each. How [much money|many dollars] does {he} have "
        "left?",
        "{b} {things} cost ${c} each. {b} * {c} = {x}.",
        "{Name} starts with ${a} and pays that. {a} - {x} = {y}.",
    ),
    (
        "One {thing} costs ${b} and one {other} costs ${c}. {Name} buys {a} {things} and one {other}. How much does "
        "{he} [pay|spend] in total?",
        "{a} {things} cost ${b} each. {a} * {b} = {x}.",
        "The {other} costs ${c} more. {x} + {c} = {y}.",
    ),
    (
        "{Name} earns ${a} an hour. {He} works {b} hours a day for {c} days. How much does {he} earn?",
        "In a day {Name} earns ${a} an hour for {b} hours. {a} * {b} = {x}.",
        "{He} works {c} days. {x} * {c} = {y}.",
    ),
    (
        "A {vehicle} has {a} passengers. At the first stop {b} people get off and {c} get on. How many "
        "passengers are on the {vehicle} now?",
        "There are {a} passengers and {b} get off. {a} - {b} = {x}.",
        "Then {c} get on. {x} + {c} = {y}.",
    ),
    (
        "{Name} has {a} {things}. {b} are {colour}, {c} are {tint} and the rest are grey. How many {things} are grey?",
        "The {colour} and {tint} ones are counted. {b} + {c} = {x}.",
        "The rest of {a} is grey. {a} - {x} = {y}.",
    ),
    (
        "A book has {a} pages. {Name} read {b} pages on {Day} and {c} pages on {Another}. How many pages are left to "
        "read?",
        "{Name} has read {b} and {c} pages. {b} + {c} = {x}.",
        "The book has {a} pages. {a} - {x} = {y}.",
    ),
    (
        "{Name} buys {a} {boxes} of {things} with {b} {things} in each. {He} shares them equally among {c} children. "
        "How many {things} does each child get?",
        "There are {a} {boxes} with {b} {things} each. {a} * {b} = {x}.",
        "{c} children share them. {x} / {c} = {y}.",
    ),
    (
        "{Name} had {a} {things} and {d} {others}. {He} sold {b} {things} on {Day} and {c} more {things} on {Another}. "
        "How many {things} does {he} have left?",
        "{b} {things} are sold on {Day}. {a} - {b} = {x}.",
        "{c} more are sold on {Another}. {x} - {c} = {y}.",
    ),
    (
        "{Name} has {a} times as many {things} as {Other}. {Other} has {b} {things}. How many more {things} does "
        "{Name} have than {Other}?",
        "{Name} has {a} times {b} {things}. {a} * {b} = {x}.",
        "{Other} has {b}. {x} - {b} = {y}.",
    ),
    (
        "{a} {things} were [packed|put] equally into {b} {boxes}. {Name} took {c} {things} out of one {box}. How many "
        "{things} are left in that {box}?",
        "{a} {things} go into {b} {boxes}. {a} / {b} = {x}.",
        "Then {c} are taken out. {x} - {c} = {y}.",
    ),
    (
        "There are {a} rows of {b} chairs in a hall. {c} more chairs are brought in. How many chairs are there now?",
        "There are {a} rows with {b} chairs each. {a} * {b} = {x}.",
        "Then {c} are added. {x} + {c} = {y}.",
    ),
)

THREE_STEPS = (
    (
        "{Name} has {a} {boxes} with {b} {things} in each. {He} buys {c} more {things} and then gives {d} {things} to "
        "{Other}. How many {things} does {Name} have now?",
        "There are {a} {boxes} with {b} {things} each. {a} * {b} = {x}.",
        "Then {c} more are bought. {x} + {c} = {y}.",
        "{d} are given away. {y} - {d} = {z}.",
    ),
    (
        "There are {a} {things} in a {box}. {Name} buys {b} {boxes} and [loses|uses|sells] {c} {things}. {He} shares "
        "the rest equally among {d} friends. How many {things} does each friend get?",
        "There are {b} {boxes} with {a} {things} each. {b} * {a} = {x}.",
        "Then {c} are gone. {x} - {c} = {y}.",
        "{d} friends share the rest. {y} / {d} = {z}.",
    ),
    (
        "{Name} has {a} {things}. {Other} has twice as many. {Third} has {b} fewer than {Other}. How many {things} do "
        "{Name} and {Third} have together?",
        "{Other} has twice {a}. {a} * 2 = {x}.",
        "{Third} has {b} fewer. {x} - {b} = {y}.",
        "{Name} and {Third} have both together. {a} + {y} = {z}.",
    ),
    (
        "{Name} buys {a} {things} for ${b} each and {c} {others} for ${d} each. How much does {he} [pay|spend] in "
        "total?",
        "{a} {things} cost ${b} each. {a} * {b} = {x}.",
        "{c} {others} cost ${d} each. {c} * {d} = {y}.",
        "Together that is the sum. {x} + {y} = {z}.",
    ),
    (
        "{Name} [sells|packs] {a} {things} on {Day}, {b} on {Another} and {c} on the day after. {d} of them are "
        "[damaged|brought back]. How many {things} are not?",
        "The first two days are added. {a} + {b} = {x}.",
        "Then the third day. {x} + {c} = {y}.",
        "{d} are taken off. {y} - {d} = {z}.",
    ),
    (
        "{Name} has ${a} and earns ${b} more. {He} buys {c} {things} at ${d} each. How much money does {he} have left?",
        "{Name} has ${a} and earns ${b}. {a} + {b} = {x}.",
        "{c} {things} cost ${d} each. {c} * {d} = {y}.",
        "That is paid. {x} - {y} = {z}.",
    ),
    (
        "{Name} saves ${a} a week for {b} weeks. {He} already had ${c}. Then {he} buys a bicycle for ${d}. How much "
        "money is left?",
        "In {b} weeks {Name} saves ${a} a week. {a} * {b} = {x}.",
        "With the money from before there is ${c} more. {x} + {c} = {y}.",
        "The bicycle costs ${d}. {y} - {d} = {z}.",
    ),
    (
        "{Name} has {a} {things}, and {Other} has {b} more than {Name}. They put all their {things} into {c} {boxes}, "
        "the same number in each. How many {things} are in each {box}?",
        "{Other} has {b} more than {a}. {a} + {b} = {x}.",
        "Together they have both. {a} + {x} = {y}.",
        "They go into {c} {boxes}. {y} / {c} = {z}.",
    ),
    (
        "A [baker|farmer|shop] has {a} {boxes} of {b} {things}. {c} {things} are sold in the morning and {d} in the "
        "afternoon. How many {things} are left?",
        "There are {a} {boxes} with {b} {things} each. {a} * {b} = {x}.",
        "In the morning {c} are sold. {x} - {c} = {y}.",
        "In the afternoon {d} are sold. {y} - {d} = {z}.",
    ),
    (
        "{Name} reads {a} pages a day for {b} days and {c} pages on the day after. The book has {d} pages. How many "
        "pages are left?",
        "In {b} days {Name} reads {a} pages a day. {a} * {b} = {x}.",
        "With the day after there are {c} more. {x} + {c} = {y}.",
        "The book has {d} pages. {d} - {y} = {z}.",
    ),
    (
        "A class has {a} boys and {b} girls. They form {c} equal groups, and {d} children join every group. How many "
        "children are in each group now?",
        "The boys and the girls are counted together. {a} + {b} = {x}.",
        "They form {c} groups. {x} / {c} = {y}.",
        "{d} join each group. {y} + {d} = {z}.",
    ),
    (
        "{Name} had {a} {things}. {He} gave half of them to {Other}, then found {b} more and lost {c}. How many "
        "{things} does {Name} have now?",
        "{Name} keeps half of {a}. {a} / 2 = {x}.",
        "Then {b} more are found. {x} + {b} = {y}.",
        "{c} are lost. {y} - {c} = {z}.",
    ),
    (
        "{Name} works {a} hours on {Day} and {b} hours on {Another}. {He} earns ${c} an hour and spends ${d}. How much "
        "money does {he} have left?",
        "The hours of the two days are added. {a} + {b} = {x}.",
        "Each hour brings ${c}. {x} * {c} = {y}.",
        "${d} is spent. {y} - {d} = {z}.",
    ),
    (
        "There are {a} {things} on one table and {b} on another. {Name} takes {c} {things} away and brings twice as "
        "many as {he} took. How many {things} are on the tables [now|in the end]?",
        "Both tables are counted together. {a} + {b} = {x}.",
        "{c} are taken away. {x} - {c} = {y}.",
        "Twice {c} are brought: {c} * 2 = {w}. {y} + {w} = {z}.",
    ),
    (
        "{Name} is {a} years old. {Other} is twice as old as {Name}, and {Third} is {b} years older than {Other}. How "
        "old will {Third} be in {c} years?",
        "{Other} is twice {a}. {a} * 2 = {x}.",
        "{Third} is {b} years older. {x} + {b} = {y}.",
        "In {c} years it is {c} more. {y} + {c} = {z}.",
    ),
    (
        "{Name} packs {a} {things} into {b} {boxes}, the same number in each. {He} sells {c} full {boxes} and then {d} "
        "single {things}. How many {things} did {he} sell?",
        "{a} {things} go into {b} {boxes}. {a} / {b} = {x}.",
        "{c} full {boxes} are sold. {c} * {x} = {y}.",
        "Then {d} single ones. {y} + {d} = {z}.",
    ),
    (
        "A {vehicle} starts with {a} passengers. At the first stop {b} get on, at the second {c} get off and at the "
        "third {d} get off. How many passengers are left?",
        "At the first stop {b} get on. {a} + {b} = {x}.",
        "At the second {c} get off. {x} - {c} = {y}.",
        "At the third {d} get off. {y} - {d} = {z}.",
    ),
    (
        "{Name} has {a} {things}. {Other} has {b} times as many, and {Third} has {c} {things} more than {Other}. How "
        "many {things} do {Other} and {Third} have together?",
        "{Other} has {b} times {a}. {b} * {a} = {x}.",
        "{Third} has {c} more. {x} + {c} = {y}.",
        "{Other} and {Third} have both together. {x} + {y} = {z}.",
    ),
)
