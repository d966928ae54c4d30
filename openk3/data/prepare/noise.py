"""Bad text made from good text: what the quality model learns to refuse where no bad examples are given."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Callable

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MENU_WORDS = (
    "Home|About|Contact|Login|Sign up|Search|Menu|Next|Previous|Back to top|Share|Tweet|Print|Comments (0)|Read more"
    "|Subscribe|Follow us|Privacy|Terms|Sitemap|FAQ|Help|Cart (0)|Checkout|My account|Register|Forgot password?|RSS"
    "|Categories|Archives|Tags|Recent posts|Related articles|Leave a reply|Reply|Report|Advertisement|Sponsored"
)
_AD_PHRASES = (
    "buy {0} online cheap|best {0} {1} deals|{0} free shipping|order {0} now|cheap {0} {1} for sale|{0} discount coupon"
    "|top 10 {0} {1}|{0} reviews {1}|click here for {0}|lowest price {0} guaranteed|{0} {1} download free full version"
    "|hot {0} {1} sale limited offer|where to buy {0} no prescription|{0} near me|win {0} today|100% {0} satisfaction"
)
_MENU, _ADS = _MENU_WORDS.split("|"), _AD_PHRASES.split("|")
_LEVELS = ("INFO", "DEBUG", "WARN", "ERROR", "TRACE")


def bad_prose(text: str, rng: random.Random) -> str:
    """One kind of bad prose, of about the text's length and mostly of its words."""
    return rng.choice(_PROSE)(text, rng)


def bad_code(text: str, rng: random.Random) -> str:
    """One kind of bad code, of about the text's length."""
    return rng.choice(_CODE)(text, rng)


def _salad(text: str, rng: random.Random) -> str:
    """All words in any order."""
    words = text.split()
    rng.shuffle(words)
    return _wrapped(words, rng)


def _scraps(text: str, rng: random.Random) -> str:
    """Runs of one to three words in any order."""
    words, runs = text.split(), []
    while words:
        size = rng.randint(1, 3)
        runs.append(" ".join(words[:size]))
        words = words[size:]
    rng.shuffle(runs)
    return _wrapped(runs, rng)


def _wrapped(words: list[str], rng: random.Random) -> str:
    return "".join(word + ("\n" if rng.random() < 0.07 else " ") for word in words)


def _misread(text: str, rng: random.Random) -> str:
    """As a scanner misreads a page."""
    rate = rng.uniform(0.08, 0.3)
    marks = _LETTERS + "|~^*_<>{}0123456789"
    return "".join(rng.choice(marks) if rng.random() < rate and not c.isspace() else c for c in text)


def _menus(text: str, rng: random.Random) -> str:
    """A page's navigation, with a few words of its own."""
    words = re.findall(r"\w+", text) or ["page"]
    parts = []
    while sum(map(len, parts)) < min(len(text), 2000):
        some = [rng.choice(_MENU) for _ in range(rng.randint(2, 6))] + [rng.choice(words).title()]
        parts.append(rng.choice((" | ", "\n", " \u203a ", " * ")).join(some))
    return "\n".join(parts)


def _advertised(text: str, rng: random.Random) -> str:
    """Key words for search engines."""
    words = re.findall(r"\w{4,}", text.lower()) or ["watch"]
    subject = rng.sample(words, min(6, len(words)))
    parts: list[str] = []
    while sum(map(len, parts)) < min(len(text), 3000):
        parts.append(rng.choice(_ADS).format(rng.choice(subject), rng.choice(subject)))
    return rng.choice((", ", ". ", "\n", " | ")).join(parts)


def _listed(text: str, rng: random.Random) -> str:
    """Names and numbers without a sentence."""
    words = re.findall(r"\w+", text) or ["item"]
    rows = []
    while sum(map(len, rows)) < min(len(text), 3000):
        cells = [
            rng.choice(words),
            *(f"{rng.uniform(0, 10 ** rng.randint(1, 6)):.{rng.randint(0, 3)}f}" for _ in "123"),
        ]
        rng.shuffle(cells)
        rows.append(rng.choice(("\t", "  ", ", ", " | ")).join(cells))
    return "\n".join(rows)


def _logged(text: str, rng: random.Random) -> str:
    """A machine's log."""
    words, rows = re.findall(r"\w+", text) or ["job"], []
    while sum(map(len, rows)) < min(len(text), 3000):
        at = f"2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02} {rng.randint(0, 23):02}:{rng.randint(0, 59):02}:00"
        said = " ".join(rng.choice(words) for _ in range(rng.randint(2, 6)))
        rows.append(
            f"{at} {rng.choice(_LEVELS)} [{rng.choice(words)}-{rng.randint(1, 99)}] {said} id={rng.random():.6f}"
        )
    return "\n".join(rows)


def _encoded(text: str, rng: random.Random) -> str:
    """Bytes as base64 or numbers, in lines."""
    data = rng.randbytes(min(len(text), 3000) // 2)
    if rng.random() < 0.5:
        coded = base64.b64encode(data).decode()
        return "\n".join(coded[i : i + 76] for i in range(0, len(coded), 76))
    numbers = [f"0x{byte:02x}," for byte in data[: len(data) // 2]]
    return "\n".join(" ".join(numbers[i : i + 12]) for i in range(0, len(numbers), 12))


def _squeezed(text: str, rng: random.Random) -> str:
    """Without the blanks and names that people read by."""
    names = {name: rng.choice(_LETTERS) + rng.choice(_LETTERS) for name in set(re.findall(r"\b[a-z_]\w{3,}\b", text))}
    short = re.sub(r"\b[a-z_]\w{3,}\b", lambda found: names[found[0]], re.sub(r"#.*|//.*", "", text))
    return ";".join(re.sub(r"\s*([^\w\s])\s*", r"\1", line.strip()) for line in short.split("\n") if line.strip())


def _disordered(text: str, rng: random.Random) -> str:
    """All tokens of the code in any order, in lines of its lengths."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    rng.shuffle(tokens)
    rows = []
    while tokens:
        size = rng.randint(1, 12)
        rows.append(" " * rng.choice((0, 0, 4, 8)) + " ".join(tokens[:size]))
        tokens = tokens[size:]
    return "\n".join(rows)


def _dumped(text: str, rng: random.Random) -> str:
    """Data as an object of names and numbers."""
    words = re.findall(r"[A-Za-z]\w+", text) or ["key"]
    rows = []
    while sum(map(len, rows)) < min(len(text), 3000):
        value = rng.choice(
            (str(rng.randint(0, 99999)), f'"{rng.choice(words)}"', f"{rng.random():.5f}", "null", "true")
        )
        rows.append(f'"{rng.choice(words)}{rng.randint(0, 999)}": {value},')
    return "{\n" + "\n".join(rows) + "\n}"


Maker = Callable[[str, random.Random], str]
_PROSE: tuple[Maker, ...] = (_salad, _scraps, _misread, _menus, _advertised, _listed, _logged)
_CODE: tuple[Maker, ...] = (_encoded, _squeezed, _disordered, _misread, _dumped, _listed, _logged)
