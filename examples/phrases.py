"""Dates, times and amounts in words, each with its standard form: a skill whose answers anybody can check.

python examples/phrases.py DIRECTORY writes DIRECTORY/train/phrases.jsonl and DIRECTORY/held_out/phrases.jsonl: on each line
a conversation. TEMPLATE is the chat template, which puts what a user types into the same form.

A phrase is made of two numbers (day and month, hour and minute, units and hundredths) and one of several phrasings. If their
sum is a multiple of RESERVED, it is held out. So training has every number, every phrasing and every pair of them, but never
the two numbers and the phrasing of a held-out phrase together, whatever its year or currency.
"""

import calendar
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

TRAIN, HELD_OUT, RESERVED = 80_000, 520, 6  # conversations of each kind; one combination in so many is held out
# As in a stream of documents, an end of text comes before each phrase and ends each reply.
TEMPLATE = (
    "{% for each in messages if each['role'] != 'system' %}{{ '<|endoftext|>' if each['role'] == 'user' }}"
    "{{ each['content'] }}{{ '\\n' if each['role'] == 'user' }}{% endfor %}"
)

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
            "twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}  # fmt: skip
SUFFIXES = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st"}
MONEY = {"USD": ("dollar", "dollars", "cent", "cents"), "EUR": ("euro", "euros", "cent", "cents"),
         "GBP": ("pound", "pounds", "penny", "pence")}  # fmt: skip

Phrases = tuple[int, int, list[str], str]  # two numbers, what the phrasings make of them, and the standard form


def cardinal(number: int) -> str:
    """A number below 100 in words: forty-two."""
    if number < len(ONES):
        return ONES[number]
    return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")


def ordinal(number: int) -> str:
    """An ordinal number below 32 in words: twenty-third."""
    *tens, last = cardinal(number).split("-")
    return "-".join([*tens, ORDINALS.get(last, f"{last}th")])


def date(chance: random.Random) -> Phrases:
    """A day from 1950 to 2049."""
    year, month = chance.randint(1950, 2049), chance.randint(1, 12)
    day = chance.randint(1, calendar.monthrange(year, month)[1])
    name, short = calendar.month_name[month], f"{day}{SUFFIXES.get(day, 'th')}"
    phrasings = [
        f"the {ordinal(day)} of {name} {year}", f"the {short} of {name} {year}", f"{day} {name} {year}",
        f"{name} the {ordinal(day)}, {year}", f"{name} {short}, {year}",
    ]  # fmt: skip
    return day, month, phrasings, f"{year}-{month:02}-{day:02}"


def time(chance: random.Random) -> Phrases:
    """A minute of the day; every second one is a multiple of five, which is also read as past or to an hour."""
    hour, minute = chance.randrange(24), chance.choice((chance.randrange(60), chance.randrange(0, 60, 5)))
    part = "night" if hour in (22, 23, 0) else "morning" if hour < 12 else "afternoon" if hour < 18 else "evening"
    part, half = f"at {part}" if part == "night" else f"in the {part}", "am" if hour < 12 else "pm"
    this, following = (cardinal((each - 1) % 12 + 1) for each in (hour, hour + 1))
    digits, read = f"{(hour - 1) % 12 + 1}:{minute:02}", f"{this} {cardinal(minute)}"
    if minute < 10:
        read = f"{this} oh {cardinal(minute)}" if minute else f"{this} o'clock"
    phrasings = [f"{read} {part}", f"{digits} {part}", f"{read} {half}", f"{digits} {half}"]
    if minute % 5 == 0 < minute:
        distance = min(minute, 60 - minute)
        counted = {15: "quarter", 30: "half"}.get(distance, cardinal(distance))
        phrasings.append(f"{counted} past {this} {part}" if minute <= 30 else f"{counted} to {following} {part}")
    return hour, minute, phrasings, f"{hour:02}:{minute:02}"


def amount(chance: random.Random) -> Phrases:
    """An amount of money below 100."""
    units, hundredths, code = chance.randint(1, 99), chance.randint(1, 99), chance.choice(list(MONEY))
    one, many, cent, cents = MONEY[code]
    unit, part = one if units == 1 else many, cent if hundredths == 1 else cents
    phrasings = [
        f"{cardinal(units)} {unit} and {cardinal(hundredths)} {part}", f"{units} {unit} and {hundredths} {part}",
        f"{cardinal(hundredths)} {part} and {cardinal(units)} {unit}", f"{cardinal(units)} {unit} {cardinal(hundredths)}",
    ]  # fmt: skip
    return units, hundredths, phrasings, f"{code} {units}.{hundredths:02}"


def conversations(held_out: bool, seed: int) -> Iterator[tuple[str, str]]:
    """Phrases of one kind with their standard form, without end; some repeat."""
    chance = random.Random(seed)
    while True:
        first, second, phrasings, form = chance.choice((date, time, amount))(chance)
        phrasing = chance.randrange(len(phrasings))
        if ((first + second + phrasing) % RESERVED == 0) == held_out:
            yield phrasings[phrasing], form


def write_phrases(directory: str | Path) -> dict[str, str]:
    """Write the two files; return {phrase: standard form} of those that are held out."""
    kinds = dict(
        train=islice(conversations(False, seed=1), TRAIN), held_out=islice(conversations(True, seed=2), HELD_OUT)
    )
    held_out = {}
    for name, pairs in kinds.items():
        held_out = list(pairs)
        path = Path(directory) / name / "phrases.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"{phrase}\n{form}"}) + "\n" for phrase, form in held_out))
    return dict(held_out)


if __name__ == "__main__":
    write_phrases(*sys.argv[1:])
