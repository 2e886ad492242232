"""What may be said and asked about made-up persons, towns, rivers ... Data only; ``profiles.py`` has the notation."""

# ruff: noqa: SIM905 - lists of words are read as words, not as two hundred pairs of quotes

from __future__ import annotations

from typing import NamedTuple


class Fact(NamedTuple):
    """One property: what kind of value it has, how a passage may state it, and how it may be asked for."""

    value: str
    sentences: tuple[str, ...]
    questions: tuple[str, ...]


class Kind(NamedTuple):
    """A kind of thing: how it is named, and its properties. The first property opens a passage."""

    name: str
    facts: tuple[Fact, ...]


# values that are drawn from a list; the other kinds of values are made up in profiles.py
WORDS = {
    "trade": "carpenter baker painter teacher sailor surgeon printer gardener lawyer weaver potter librarian "
    "photographer geologist shoemaker clockmaker botanist journalist blacksmith".split(),
    "goods": "wool|copper|timber|salt|honey|glass|paper|tea|leather|rope|wheat|silk|tin|cheese|linen|coal|olive oil|"
    "dried fish|marble|tobacco".split("|"),
    "stone": "granite|red brick|limestone|oak|grey slate|steel|sandstone|white marble|iron|basalt|pine|concrete".split(
        "|"
    ),
    "animal": "otters|storks|wild horses|bats|seals|beavers|cranes|deer|wolves|salmon|pelicans|foxes|eels|owls".split(
        "|"
    ),
    "music": "the violin|the flute|the piano|the cello|the trumpet|the harp|the guitar|the organ|the drums|the "
    "clarinet|the accordion|the oboe".split("|"),
    "hobby": "chess|fencing|astronomy|sailing|gardening|pottery|fishing|beekeeping|archery|swimming|skating|"
    "bird watching|wood carving|mountain climbing".split("|"),
    "colour": "dark blue|bright red|green|white|black|yellow|grey|orange|violet|silver|brown|pale green".split("|"),
    "food": "onion soup|plum cake|smoked trout|rye bread|apple pie|pickled herring|goat cheese|lentil stew|"
    "pumpkin dumplings|roast duck|nut bread|cherry jam".split("|"),
    "month": "January February March April May June July August September October November December".split(),
    "disaster": "a fire|a flood|a storm|an earthquake|a landslide|a hurricane|heavy snow|an explosion".split("|"),
    "accident": "a fire|a storm|lightning|an iceberg|a reef|another ship|a whale|high waves".split("|"),
    "topic": "medicine|law|history|chemistry|philosophy|mathematics|music|architecture|geology|physics|theology|"
    "botany".split("|"),
}

KINDS = (
    Kind(
        "person",
        (
            Fact(
                "trade",
                ("{It} was a {v}.", "{It} worked as a {v}.", "{It} was known as a gifted {v}."),
                ("What was the profession of {name}?", "What did {name} work as?", "What was {name}'s job?"),
            ),
            Fact(
                "place",
                ("{It} was born in {v}.", "{It} came from the town of {v}.", "{Its} birthplace was {v}."),
                ("Where was {name} born?", "In which town was {name} born?", "What was the birthplace of {name}?"),
            ),
            Fact(
                "year",
                ("{It} was born in {v}.", "The year of {its} birth was {v}.", "{Its} life began in {v}."),
                ("In what year was {name} born?", "When was {name} born?", "What was {name}'s year of birth?"),
            ),
            Fact(
                "place",
                ("Later {it} lived in {v}.", "{It} spent most of {its} life in {v}.", "{It} settled in {v}."),
                ("Where did {name} live later?", "In which town did {name} settle?"),
            ),
            Fact(
                "date",
                ("{It} died on {v}.", "{Its} death was reported on {v}."),
                ("When did {name} die?", "On what date did {name} die?", "What was the date of {name}'s death?"),
            ),
            Fact(
                "person",
                ("{It} was married to {v}.", "{It} married {v}.", "{Its} spouse was {v}."),
                ("Who was married to {name}?", "Whom did {name} marry?", "Who was the spouse of {name}?"),
            ),
            Fact(
                "music",
                ("In the evenings {it} played {v}.", "{It} could play {v}.", "{It} was also good at playing {v}."),
                ("Which instrument did {name} play?", "What did {name} play in the evenings?"),
            ),
            Fact(
                "hobby",
                ("{It} loved {v}.", "{Its} favourite pastime was {v}.", "In {its} free time {it} enjoyed {v}."),
                ("What was {name}'s favourite pastime?", "What did {name} do in free time?", "What did {name} love?"),
            ),
            Fact(
                "topic",
                ("{It} had studied {v}.", "As a student {it} chose {v}.", "{Its} degree was in {v}."),
                ("What did {name} study?", "Which subject did {name} study?", "What was {name}'s degree in?"),
            ),
            Fact(
                "person",
                ("{Its} teacher was {v}.", "{It} learned everything from {v}.", "{It} was taught by {v}."),
                ("Who was the teacher of {name}?", "Who taught {name}?", "From whom did {name} learn?"),
            ),
        ),
    ),
    Kind(
        "town",
        (
            Fact(
                "place",
                ("{It} is a town in the region of {v}.", "{It} is a small town in {v}.", "{It} lies in {v}."),
                ("In which region is {name}?", "Where does {name} lie?", "What region does {name} belong to?"),
            ),
            Fact(
                "count",
                ("{It} has {v} inhabitants.", "{Its} population is {v}.", "About {v} people live there."),
                ("How many people live in {name}?", "What is the population of {name}?"),
            ),
            Fact(
                "year",
                ("{It} was founded in {v}.", "{Its} history begins in {v}.", "The first houses were built in {v}."),
                ("When was {name} founded?", "In which year was {name} founded?"),
            ),
            Fact(
                "person",
                ("The mayor is {v}.", "{Its} mayor is {v}.", "Since the last election {v} has been mayor."),
                ("Who is the mayor of {name}?", "What is the name of {name}'s mayor?"),
            ),
            Fact(
                "goods",
                ("{It} is known for its {v}.", "For centuries it has traded in {v}.", "{It} lives from {v}."),
                ("What is {name} known for?", "What does {name} trade in?"),
            ),
            Fact(
                "stone",
                ("The town hall is built of {v}.", "{Its} town hall is made of {v}."),
                ("What is the town hall of {name} built of?", "What material is {name}'s town hall made of?"),
            ),
            Fact(
                "disaster",
                ("A part of it was destroyed by {v}.", "{It} was once damaged by {v}."),
                ("What destroyed a part of {name}?", "What was {name} once damaged by?"),
            ),
            Fact(
                "month",
                ("The yearly market is held in {v}.", "{Its} fair takes place every {v}."),
                ("In which month is the market of {name} held?", "When does {name} hold its yearly fair?"),
            ),
            Fact(
                "food",
                ("Visitors come for the {v}.", "{Its} most famous dish is {v}."),
                ("What is the most famous dish of {name}?", "Which dish do visitors of {name} come for?"),
            ),
        ),
    ),
    Kind(
        "company",
        (
            Fact(
                "goods",
                ("{It} is a company that sells {v}.", "{It} is a maker of {v}.", "{It} deals in {v}."),
                ("What does {name} sell?", "What does {name} deal in?"),
            ),
            Fact(
                "person",
                ("{It} was founded by {v}.", "The founder was {v}.", "{Its} founder was {v}."),
                ("Who founded {name}?", "Who was the founder of {name}?"),
            ),
            Fact(
                "year",
                ("{It} opened its doors in {v}.", "{It} was established in {v}.", "Business began in {v}."),
                ("When was {name} established?", "In which year did {name} open?"),
            ),
            Fact(
                "place",
                ("{Its} head office is in {v}.", "{It} is based in {v}.", "The headquarters are in {v}."),
                ("Where is the head office of {name}?", "In which town is {name} based?"),
            ),
            Fact(
                "count",
                ("{It} employs {v} people.", "{It} has {v} workers.", "{Its} staff counts {v}."),
                ("How many people does {name} employ?", "How many workers does {name} have?"),
            ),
            Fact(
                "person",
                ("Today {v} runs it.", "The present director is {v}.", "{Its} director is {v}."),
                ("Who is the director of {name}?", "Who runs {name} today?"),
            ),
            Fact(
                "colour",
                ("{Its} delivery vans are {v}.", "The colour of its sign is {v}."),
                ("What is the colour of the vans or signs of {name}?", "Which colour does {name} use?"),
            ),
            Fact(
                "place",
                ("A second factory stands in {v}.", "{It} also has a workshop in {v}."),
                ("Where is the second factory or workshop of {name}?", "Where else does {name} have a workshop?"),
            ),
        ),
    ),
    Kind(
        "river",
        (
            Fact(
                "place",
                ("{It} is a river in {v}.", "{It} is a river that crosses {v}.", "{It} flows through {v}."),
                ("Through which land does {name} flow?", "In which land is {name}?"),
            ),
            Fact(
                "length",
                ("{It} is {v} long.", "{Its} length is {v}.", "From source to mouth it measures {v}."),
                ("How long is {name}?", "What is the length of {name}?"),
            ),
            Fact(
                "height",
                ("{Its} source lies at {v}.", "{It} rises at a height of {v}."),
                ("At what height does {name} rise?", "How high is the source of {name}?"),
            ),
            Fact(
                "place",
                ("{It} reaches the sea at {v}.", "{It} flows into the sea near {v}.", "{Its} mouth is at {v}."),
                ("Where does {name} reach the sea?", "At which town is the mouth of {name}?"),
            ),
            Fact(
                "animal",
                ("Many {v} live on its banks.", "It is a home of {v}.", "{It} is famous for its {v}."),
                ("Which animals live along {name}?", "What animals is {name} famous for?"),
            ),
            Fact(
                "month",
                ("Floods are common in {v}.", "{It} often floods in {v}.", "{Its} water is highest in {v}."),
                ("In which month does {name} flood?", "When is the water of {name} highest?"),
            ),
            Fact(
                "year",
                ("The first bridge over it was built in {v}.", "{It} has had a bridge since {v}."),
                ("When was {name} first bridged?", "Since which year has {name} had a bridge?"),
            ),
        ),
    ),
    Kind(
        "ship",
        (
            Fact(
                "place",
                ("{It} was a ship built in {v}.", "{It} was launched in {v}.", "{It} was a ship from {v}."),
                ("Where was {name} built?", "In which port was {name} launched?"),
            ),
            Fact(
                "year",
                ("{It} was launched in {v}.", "{Its} first voyage was in {v}.", "{It} first sailed in {v}."),
                ("When did {name} first sail?", "In which year was the first voyage of {name}?"),
            ),
            Fact(
                "person",
                ("{Its} captain was {v}.", "{It} sailed under Captain {v}.", "The captain was {v}."),
                ("Who was the captain of {name}?", "Under which captain did {name} sail?"),
            ),
            Fact(
                "goods",
                ("{It} carried {v}.", "{Its} cargo was {v}.", "On most voyages it brought {v}."),
                ("What was the cargo of {name}?", "What did {name} carry?"),
            ),
            Fact(
                "count",
                ("{It} had room for {v} passengers.", "{It} could take {v} passengers."),
                ("How many passengers could {name} take?", "For how many passengers did {name} have room?"),
            ),
            Fact(
                "date",
                ("{It} sank on {v}.", "{It} was lost on {v}.", "{Its} last voyage ended on {v}."),
                ("When was {name} lost?", "On what date did the last voyage of {name} end?"),
            ),
            Fact(
                "accident",
                ("{It} was once damaged by {v}.", "In {its} third year it was hit by {v}."),
                ("What damaged {name}?", "What was {name} hit by?"),
            ),
            Fact(
                "colour",
                ("{Its} hull was {v}.", "The sails were {v}.", "{It} was painted {v}."),
                ("What was the colour of {name}?", "In which colour was {name} painted?"),
            ),
        ),
    ),
    Kind(
        "bridge",
        (
            Fact(
                "place",
                ("{It} is a bridge in {v}.", "{It} is the oldest bridge of {v}.", "{It} stands in {v}."),
                ("In which town is {name}?", "Where does {name} stand?"),
            ),
            Fact(
                "span",
                ("{It} is {v} long.", "{Its} length is {v}.", "From end to end it measures {v}."),
                ("How long is {name}?", "What is the length of {name}?"),
            ),
            Fact(
                "stone",
                ("{It} is built of {v}.", "Its pillars are made of {v}.", "It was made of {v}."),
                ("What is {name} built of?", "Which material was used for {name}?"),
            ),
            Fact(
                "person",
                ("It was designed by {v}.", "{Its} architect was {v}.", "The plans were drawn by {v}."),
                ("Who designed {name}?", "Who was the architect of {name}?"),
            ),
            Fact(
                "date",
                ("{It} was opened on {v}.", "The first people crossed it on {v}."),
                ("When was {name} opened?", "On which date was {name} opened?"),
            ),
            Fact(
                "count",
                ("Every day {v} people cross it.", "{It} is used by {v} people a day."),
                ("How many people cross {name} every day?", "How many people use {name} a day?"),
            ),
            Fact(
                "animal",
                ("{It} is a home of {v}.", "At its northern end stand two statues of {v}."),
                ("Which animals can be found at {name}?", "What animals are at {name}?"),
            ),
        ),
    ),
    Kind(
        "school",
        (
            Fact(
                "place",
                ("{It} is a school in {v}.", "{It} is the only school in {v}.", "{It} is in {v}."),
                ("Where is {name}?", "In which town is {name}?"),
            ),
            Fact(
                "count",
                ("{It} has {v} pupils.", "{It} is attended by {v} pupils.", "There are {v} pupils."),
                ("How many pupils does {name} have?", "How many pupils attend {name}?"),
            ),
            Fact(
                "person",
                ("The head teacher is {v}.", "{It} is led by {v}.", "{Its} head is {v}."),
                ("Who leads {name}?", "Who is the head teacher of {name}?"),
            ),
            Fact(
                "year",
                ("{It} was opened in {v}.", "Lessons began in {v}.", "{It} has existed since {v}."),
                ("When was {name} opened?", "Since which year has {name} existed?"),
            ),
            Fact(
                "topic",
                ("{It} is best known for teaching {v}.", "The main subject is {v}."),
                ("What is {name} best known for teaching?", "What is the main subject at {name}?"),
            ),
            Fact(
                "colour",
                ("The uniforms are {v}.", "{Its} pupils wear {v}.", "Its flag is {v}."),
                ("Which colour belongs to {name}?", "What is the colour of the uniform or flag of {name}?"),
            ),
            Fact(
                "hobby",
                ("In the afternoon the pupils can learn {v}.", "{It} also has a club for {v}."),
                ("What can pupils of {name} do in a club or in the afternoon?", "Which activity does {name} offer?"),
            ),
        ),
    ),
    Kind(
        "island",
        (
            Fact(
                "direction",
                ("{It} is an island {v}.", "{It} is a lonely island {v}."),
                ("Where is the island of {name}?", "Where does the island of {name} lie?"),
            ),
            Fact(
                "count",
                ("{It} has {v} inhabitants.", "{Its} population is {v}.", "No more than {v} people live there."),
                ("How many people live on {name}?", "What is the population of {name}?"),
            ),
            Fact(
                "height",
                ("{Its} highest point is at {v}.", "Its only mountain is {v} high."),
                ("How high is the highest point of {name}?", "How high is the mountain of {name}?"),
            ),
            Fact(
                "place",
                ("{Its} only harbour is {v}.", "{Its} main village is {v}.", "Ships land at {v}."),
                ("What is the harbour or main village of {name}?", "Where do ships land on {name}?"),
            ),
            Fact(
                "person",
                ("It was discovered by {v}.", "{Its} discoverer was {v}.", "{It} was first described by {v}."),
                ("Who discovered {name}?", "Who first described {name}?"),
            ),
            Fact(
                "year",
                ("People have lived there since {v}.", "{It} was settled in {v}."),
                ("When was {name} settled?", "Since which year have people lived on {name}?"),
            ),
            Fact(
                "animal",
                ("{It} is known for its {v}.", "In spring it belongs to the {v}.", "Large groups of {v} live there."),
                ("Which animals is {name} known for?", "Which animals live on {name}?"),
            ),
            Fact(
                "goods",
                ("The people live from {v}.", "{It} exports {v}.", "{Its} main product is {v}."),
                ("What does {name} export?", "What is the main product of {name}?"),
            ),
        ),
    ),
)
