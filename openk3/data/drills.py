"""Exercises with one right answer, from a random generator: sums, letters, counting, lists, calendar, comparisons."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence

from openk3.data.docstring_chat import Exchange

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(datetime.date(2000, month, 1).strftime("%B") for month in range(1, 13))
_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
_SMALL += ["seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_FORMS = ("What is {}?", "{} = ?", "{}", "Calculate {}.", "How much is {}?", "{}=", "Can you work out {}?")

Maker = Callable[[random.Random, Sequence[str]], Exchange]


def drill(rng: random.Random, words: Sequence[str]) -> Exchange:
    """One exercise; `words` are lower-case words to spell, count and sort."""
    makers, shares = zip(*_MAKERS)
    return rng.choices(makers, shares)[0](rng, words)


def in_words(number: int) -> str:
    """A number below a million in English."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10 - 2] + (f"-{_SMALL[number % 10]}" if number % 10 else "")
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            joint = " " if rest >= 100 else " and "
            return f"{in_words(number // size)} {name}" + (joint + in_words(rest) if rest else "")
    raise ValueError(f"{number}: not a number below a million")


def _number(rng: random.Random) -> int:
    """Numbers of one to four digits, each length often."""
    return rng.randint(0, 10 ** rng.choice((1, 1, 2, 2, 2, 3, 3, 4)) - 1)


def _ask(rng: random.Random, expression: str) -> str:
    return rng.choice(_FORMS).format(expression)


def _columns(a: int, b: int, sign: int) -> str:
    """Written addition or subtraction, digit by digit from the right; b is not above a if sign is -1."""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + sign * (y + carry)
        shown = f"{x} {'+' if sign > 0 else '-'} {y}" + (f" {'+' if sign > 0 else '-'} 1" if carry else "")
        digit, carry = total % 10, int(total > 9 or total < 0)
        steps.append(
            f"{shown} = {total}, write {digit}" + (", carry 1" if carry and sign > 0 else ", borrow 1" if carry else "")
        )
    if carry:
        steps.append("write the carry 1")
    return "; ".join(steps) + "."


def _plus(rng: random.Random, words: Sequence[str]) -> Exchange:
    a, b = _number(rng), _number(rng)
    shown = rng.choice((f"{a} + {b}", f"{a}+{b}", f"{a} plus {b}"))
    return Exchange(_ask(rng, shown), _columns(a, b, 1), f"{a} + {b} = {a + b}")


def _minus(rng: random.Random, words: Sequence[str]) -> Exchange:
    a, b = _number(rng), _number(rng)
    shown = rng.choice((f"{a} - {b}", f"{a}-{b}", f"{a} minus {b}"))
    high, low = max(a, b), min(a, b)
    thought = _columns(high, low, -1)
    if a < b:
        thought = f"{b} is larger, so the answer is negative. {b} - {a}: {thought}"
    return Exchange(_ask(rng, shown), thought, f"{a} - {b} = {a - b}")


def _times(rng: random.Random, words: Sequence[str]) -> Exchange:
    a = rng.randint(0, rng.choice((12, 12, 20, 99, 999)))
    b = rng.randint(0, rng.choice((12, 12, 20, 99)))
    shown = rng.choice((f"{a} * {b}", f"{a}*{b}", f"{a} times {b}", f"{a} x {b}"))
    parts = [int(digit) * 10**place for place, digit in enumerate(reversed(str(b))) if digit != "0"]
    if len(parts) < 2:
        thought = f"{a} times {b} is {a * b}."
    else:
        products = [f"{a} * {part} = {a * part}" for part in reversed(parts)]
        thought = "; ".join(products) + f"; {' + '.join(str(a * part) for part in reversed(parts))} = {a * b}."
    return Exchange(_ask(rng, shown), thought, f"{a} * {b} = {a * b}")


def _over(rng: random.Random, words: Sequence[str]) -> Exchange:
    b, whole = rng.randint(1, rng.choice((9, 12, 20))), rng.randint(0, rng.choice((10, 30, 100)))
    rest = rng.choice((0, 0, rng.randrange(b)))
    a = b * whole + rest
    shown = rng.choice((f"{a} / {b}", f"{a}/{b}", f"{a} divided by {b}"))
    answer = f"{a} / {b} = {whole}" + (f" remainder {rest}" if rest else "")
    return Exchange(_ask(rng, shown), f"{b} * {whole} = {b * whole}" + (f"; {rest} is left." if rest else "."), answer)


def _story(rng: random.Random, words: Sequence[str]) -> Exchange:
    name = rng.choice(
        [
            "Anna",
            "Ben",
            "Clara",
            "David",
            "Emma",
            "Finn",
            "Grace",
            "Hugo",
            "Ida",
            "Jack",
            "Lena",
            "Max",
            "Nora",
            "Oscar",
            "Paul",
            "Rosa",
        ]
    )
    thing = rng.choice(
        [
            "apples",
            "books",
            "cards",
            "coins",
            "eggs",
            "flowers",
            "marbles",
            "pencils",
            "pears",
            "shells",
            "stamps",
            "stones",
        ]
    )
    a, b = rng.randint(2, 60), rng.randint(1, 40)
    if rng.random() < 0.5:
        question = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
        return Exchange(question, f"{a} + {b} = {a + b}.", f"{name} has {a + b} {thing}.")
    high, low = max(a, b), min(a, b)
    question = f"{name} has {high} {thing} and gives {low} away. How many {thing} are left?"
    return Exchange(question, f"{high} - {low} = {high - low}.", f"{high - low} {thing} are left.")


def _compare(rng: random.Random, words: Sequence[str]) -> Exchange:
    a, b = _number(rng), _number(rng)
    if a == b:
        return Exchange(f"Which is larger, {a} or {b}?", "Both are the same.", "They are equal.")
    larger = rng.random() < 0.5
    question = f"Which is {'larger' if larger else 'smaller'}, {a} or {b}?"
    thought = f"{max(a, b)} is more than {min(a, b)}."
    return Exchange(question, thought, str(max(a, b) if larger else min(a, b)))


def _even(rng: random.Random, words: Sequence[str]) -> Exchange:
    a = _number(rng)
    kind = "odd" if a % 2 else "even"
    return Exchange(f"Is {a} even or odd?", f"Its last digit is {a % 10}, which is {kind}.", f"{a} is {kind}.")


def _sequence(rng: random.Random, words: Sequence[str]) -> Exchange:
    start, step = rng.randint(0, 30), rng.choice((1, 1, 2, 2, 3, 4, 5, 10, -1, -2))
    shown = [start + step * n for n in range(rng.randint(3, 5))]
    text = ", ".join(map(str, shown))
    following = shown[-1] + step
    return Exchange(
        f"What comes next: {text}?", f"Each number changes by {step}. {shown[-1]} becomes {following}.", str(following)
    )


def _count(rng: random.Random, words: Sequence[str]) -> Exchange:
    a = rng.randint(1, 20)
    b = a + rng.randint(2, 10)
    if rng.random() < 0.3:
        return Exchange(f"Count from {b} down to {a}.", "One less each time.", ", ".join(map(str, range(b, a - 1, -1))))
    return Exchange(f"Count from {a} to {b}.", "One more each time.", ", ".join(map(str, range(a, b + 1))))


def _say(rng: random.Random, words: Sequence[str]) -> Exchange:
    a = rng.randint(0, rng.choice((20, 99, 999, 9999)))
    if rng.random() < 0.3:
        return Exchange(f"Write {in_words(a)} in digits.", "From words to digits.", str(a))
    question = rng.choice((f"Write {a} in words.", f"How do you say {a} in words?", f"Spell out the number {a}."))
    return Exchange(question, "From digits to words.", in_words(a))


def _spell(rng: random.Random, words: Sequence[str]) -> Exchange:
    word = rng.choice(words)
    question = rng.choice(("How do you spell {}?", "Spell {}.", 'Spell the word "{}".', "spell {}")).format(word)
    return Exchange(question, "Letter by letter.", "-".join(word.upper()))


def _backwards(rng: random.Random, words: Sequence[str]) -> Exchange:
    word = rng.choice(words)
    question = rng.choice(
        ("Spell {} backwards.", "Write {} backwards.", 'Reverse the word "{}".', "What is {} backwards?")
    )
    thought = f"Letters: {' '.join(word)}. From the end: {' '.join(reversed(word))}."
    return Exchange(question.format(word), thought, word[::-1])


def _letters(rng: random.Random, words: Sequence[str]) -> Exchange:
    word = rng.choice(words)
    if rng.random() < 0.5:
        question = rng.choice(
            ("How many letters does {} have?", 'How many letters are in "{}"?', "How long is the word {}?")
        )
        counted = ", ".join(f"{letter} {n}" for n, letter in enumerate(word, 1))
        return Exchange(question.format(word), counted + ".", f"{word} has {len(word)} letters.")
    letter = rng.choice(word if rng.random() < 0.85 else "abcdefghijklmnopqrstuvwxyz")
    count = word.count(letter)
    question = rng.choice(
        ("How many {1}s are in {0}?", 'How many times does "{1}" occur in "{0}"?', "How many {1} in {0}?")
    )
    marks = " ".join(f"{c}({word[: i + 1].count(letter)})" if c == letter else c for i, c in enumerate(word))
    times = f"{count} time{'' if count == 1 else 's'}"
    return Exchange(question.format(word, letter), f"{marks}.", f"The letter {letter} occurs {times} in {word}.")


def _first(rng: random.Random, words: Sequence[str]) -> Exchange:
    word = rng.choice(words)
    end = rng.random() < 0.5
    question = f"What is the {'last' if end else 'first'} letter of {word}?"
    return Exchange(question, f"Letters: {' '.join(word)}.", word[-1] if end else word[0])


def _sort(rng: random.Random, words: Sequence[str]) -> Exchange:
    if rng.random() < 0.5:
        numbers = rng.sample(range(100), rng.randint(3, 6))
        answer = ", ".join(map(str, sorted(numbers)))
        return Exchange(f"Sort these numbers: {', '.join(map(str, numbers))}", "From the smallest up.", answer)
    chosen = rng.sample(words, rng.randint(3, 5))
    return Exchange(f"Sort these words: {', '.join(chosen)}", "By the alphabet.", ", ".join(sorted(chosen)))


def _case(rng: random.Random, words: Sequence[str]) -> Exchange:
    text = " ".join(rng.sample(words, rng.randint(1, 4)))
    if rng.random() < 0.4:
        return Exchange(f"Repeat after me: {text}", "Word by word.", text)
    return Exchange(f"Write in capital letters: {text}", "The same letters, large.", text.upper())


def _day(rng: random.Random, words: Sequence[str]) -> Exchange:
    start, away = rng.randrange(7), rng.choice((1, 1, -1, -1, 2, 3, 7, 10, rng.randint(1, 30)))
    target = DAYS[(start + away) % 7]
    if abs(away) == 1:
        where = "after" if away > 0 else "before"
        return Exchange(f"Which day comes {where} {DAYS[start]}?", "The days of the week in order.", target)
    weeks, rest = divmod(away, 7)
    thought = f"{away} days are {weeks} weeks and {rest} days. {rest} days after {DAYS[start]}: {target}."
    return Exchange(f"Today is {DAYS[start]}. What day is it in {away} days?", thought, target)


def _month(rng: random.Random, words: Sequence[str]) -> Exchange:
    n = rng.randrange(12)
    kind = rng.randrange(4)
    if kind == 0:
        return Exchange(f"Which month comes after {MONTHS[n]}?", "The months in order.", MONTHS[(n + 1) % 12])
    if kind == 1:
        return Exchange(f"Which month comes before {MONTHS[n]}?", "The months in order.", MONTHS[n - 1])
    if kind == 2:
        days = "28 days, and 29 in a leap year" if n == 1 else f"{31 if n in (0, 2, 4, 6, 7, 9, 11) else 30} days"
        return Exchange(
            f"How many days does {MONTHS[n]} have?", "The lengths of the months.", f"{MONTHS[n]} has {days}."
        )
    year = rng.randint(1890, 2100)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    thought = f"{year} / 4 leaves {year % 4}" + (
        f", and it is a full century, / 400 leaves {year % 400}" if year % 100 == 0 else ""
    )
    return Exchange(
        f"Is {year} a leap year?",
        thought + ".",
        f"{'Yes' if leap else 'No'}, {year} is {'' if leap else 'not '}a leap year.",
    )


def _minutes(rng: random.Random, words: Sequence[str]) -> Exchange:
    hour, minute, later = rng.randint(0, 23), rng.choice(range(0, 60, 5)), rng.choice((10, 15, 20, 30, 45, 60, 90, 120))
    end = hour * 60 + minute + later
    now, then = f"{hour}:{minute:02}", f"{end // 60 % 24}:{end % 60:02}"
    total = f"{hour} * 60 + {minute} + {later} = {end} minutes"
    return Exchange(
        f"It is {now}. What time is it in {later} minutes?", f"{total}, which is {then}.", f"It is {then} then."
    )


_MAKERS: tuple[tuple[Maker, int], ...] = (
    (_plus, 20),
    (_minus, 13),
    (_times, 14),
    (_over, 8),
    (_story, 6),
    (_compare, 4),
    (_even, 2),
    (_sequence, 4),
    (_count, 2),
    (_say, 4),
    (_spell, 5),
    (_backwards, 5),
    (_letters, 8),
    (_first, 2),
    (_sort, 5),
    (_case, 2),
    (_day, 4),
    (_month, 4),
    (_minutes, 3),
)
