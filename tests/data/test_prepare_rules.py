"""Rules, repetition and domain labels: each rule drops what it says, and good text of every kind stays."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.config.prepare import DOMAINS
from openk3.data.prepare import domains, rules
from openk3.data.prepare.measures import Measures
from openk3.data.prepare.repetition import repeated_parts, repeated_runs, top_run

PROSE = """The river rises in the hills to the north of the town, and for most of its length it is narrow and quick.
In the eighteenth century it drove eleven mills, of which two are standing; one of them was a fulling mill until 1851.

Below the old bridge the water is slower, and the meadows on both banks are flooded in most winters. Farmers have kept
the ditches open since the monks first cut them, although the work is now paid for by the county. A survey of 1998
found forty species of plants in these ditches, such as water violet, which grows almost nowhere else in the region."""
CODE = '''import os


def sizes(folder):
    """Bytes of every file."""
    found = {}
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            found[name] = os.path.getsize(path)
    return found
'''
MATHEMATICS = r"""Let $V$ be a vector space over a field $K$, and let $T : V \to V$ be a linear map. We say that a
scalar $\lambda \in K$ is an eigenvalue of $T$ if there is a nonzero vector $v$ with $Tv = \lambda v$. The following
lemma is used throughout this chapter, and its proof is short. Suppose that $\lambda_1, \dots, \lambda_n$ are distinct.
If $\sum a_i v_i = 0$, apply $T$ to both sides and subtract $\lambda_1$ times the equation; by induction all $a_i$
vanish."""
WEB = """Thanks for stopping by our website! We have been making candles in our own workshop since last spring, and we
ship them everywhere. If you have any questions about an order, you can always send us an email and we will get back to
you within a day. Sign up for our newsletter to hear about new scents before anyone else does. We love to see how you
use our candles at home, so please share your pictures with us online and tell your friends about this little shop."""
GOOD = {"knowledge": PROSE, "code": CODE, "mathematics": MATHEMATICS, "web": WEB}


def broken(text: str, domain: str, **settings: bool) -> str:
    """The first rule that drops it."""
    return rules.first_broken(Measures(text, **settings), domain)


@pytest.mark.parametrize("domain", DOMAINS)
def test_good_text_stays_and_gets_its_label(domain: str) -> None:
    """No rule drops it, whatever the language asked for."""
    assert broken(GOOD[domain], domain) == broken(GOOD[domain], domain, english_only=True) == ""
    assert domains.label(Measures(GOOD[domain]), "") == domain


def test_other_languages_stay() -> None:
    """Scripts without spaces are counted by their letters; German is no worse than English, unless English is asked."""
    chinese = "\u8fd9\u6761\u6cb3\u4ece\u5c71\u91cc\u6d41\u51fa\u6765\u7ecf\u8fc7\u57ce\u5e02\u3002"
    varied = "".join(chr(0x4E00 + 37 * n % 3000) + ("\u3002" if n % 17 == 16 else "") for n in range(204))
    assert Measures(chinese).is_unspaced and broken(varied, "knowledge") == ""
    german = (
        "Der Fluss entspringt in den Bergen im Norden und ist auf seiner ganzen L\u00e4nge schmal. Fr\u00fcher trieb er"
        " elf M\u00fchlen an, von denen heute noch zwei stehen. Unterhalb der alten Br\u00fccke flie\u00dft das Wasser"
        " langsamer, und die Wiesen werden im Winter meistens \u00fcberschwemmt. Die Bauern halten die Gr\u00e4ben seit"
        " Jahrhunderten offen, obwohl die Arbeit inzwischen vom Landkreis bezahlt wird und kaum jemand sie sieht."
    )
    assert broken(german, "web") == "" and broken(german, "web", english_only=True) == "stop_words"


def lines(
    count: int, make: str = "Line {0} says that {0} things are to be told about the number {0} of them here."
) -> str:
    """Different sentences."""
    return "\n".join(make.format(random.Random(n).getrandbits(40)) for n in range(count))


WORDS = " ".join(PROSE.split())
BAD = {
    "nul": ("web", PROSE + "\0"),
    "empty": ("web", "... !!! ---"),
    "control": ("web", PROSE + "\ufffd" * 40),
    "words_few": ("web", "Only a few words are here. They are too few. They go."),
    "word_length": ("web", "a b c " + "of it " * 60),
    "symbols": (
        "web",
        WORDS.replace(" the", " #the").replace(" of", " #of").replace(" in", " #in").replace(" a", " #a"),
    ),
    "bullets": ("web", "\n".join(f"- {line}" for line in lines(20).split("\n"))),
    "ellipsis": ("web", "\n".join(f"{line[:-1]}..." for line in lines(20).split("\n"))),
    "letters": ("web", " ".join(f"{n} 12.5 3{n} word{n}," for n in range(40)) + ". Yes. No. Yes."),
    "stop_words": (
        "web",
        "Zwei kleine Worte stehen hier. " + " ".join(f"Wort{chr(97 + n % 26)}{n}." for n in range(60)),
    ),
    "lorem_ipsum": ("web", PROSE + " Lorem ipsum dolor sit amet."),
    "script_notice": ("web", PROSE + " Please enable JavaScript."),
    "policy_notice": ("web", PROSE + " Read our cookie policy."),
    "braces": ("web", PROSE + " function() { }"),
    "sentences_few": ("knowledge", PROSE.replace(".", "").replace("\n\n", " ") + "."),
    "line_ends": ("knowledge", "\n".join(f"{line[:-1]}" for line in lines(20).split("\n")) + "\nOne. Two. Three."),
    "short_lines": ("knowledge", "\n".join(f"Short line {n}." for n in range(40))),
    "repeated_lines": ("web", "\n".join([*lines(20).split("\n")[:10], *[lines(1)] * 8])),
    "repeated_paragraphs": ("web", "\n\n".join([PROSE, *["One line of it.\nAnother line of it."] * 4])),
    "top_run": (
        "web",
        lines(12, "{0} cheap watches for sale {0}x. cheap watches for sale {0}y. cheap watches for sale."),
    ),
    "repeated_runs": (
        "web",
        lines(12, "{0}a. the whole of this long sentence comes again and again with one number behind it {0}."),
    ),
    "lines_few": ("code", "x = 1\n"),
    "line_longest": ("code", CODE + "x = [" + "1, " * 500 + "]\n"),
    "line_mean": ("code", "\n".join("value = " + "a + " * 40 + "b" for _ in range(5))),
    "code_letters": ("code", "\n".join(["(((;;;)))" * 5, "a", "{}[]{}[]" * 5])),
    "generated": ("code", "# Code generated by protoc. DO NOT EDIT.\n" + CODE),
    "encoded": ("code", "\n".join(["key = [", *["0x1f, " * 70] * 4, *["x"] * 30, "]"])),
}


@pytest.mark.parametrize("name", BAD)
def test_each_rule_drops_what_it_says(name: str) -> None:
    """By the named rule, and not by another before it."""
    domain, text = BAD[name]
    (rule,) = (rule for rule in rules.RULES if rule.name == name)
    assert domain in rule.domains and rule.drops(Measures(text, english_only=name == "stop_words"))
    assert not rule.drops(Measures(GOOD[domain]))
    others = tuple(rule for rule in rules.RULES if rule.name != name)
    assert rules.first_broken(Measures(GOOD[domain]), domain, others) == ""


def test_every_rule_is_tried() -> None:
    """And has a name of its own, a source and a sentence."""
    assert set(BAD) == set(rules.NAMES) and len(rules.NAMES) == len(rules.RULES)
    assert all(rule.says and rule.source and set(rule.domains) <= set(DOMAINS) for rule in rules.RULES)


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 6))
def test_runs_as_their_definition_counts_them(words: list[str], length: int) -> None:
    """Against tuples of words and sets of covered places."""
    hashes = np.array([ord(word) * 1_000_003 for word in words], np.uint64)
    lengths = np.arange(1, len(words) + 1)
    places = range(len(words) - length + 1)
    runs = [tuple(words[place : place + length]) for place in places]
    covered = {n for place in places if runs[place] in runs[:place] for n in range(place, place + length)}
    total = sum(range(1, len(words) + 1))
    share = sum(n + 1 for n in covered) / total if words else 0
    assert repeated_runs(hashes, lengths, length) == pytest.approx(share)
    counts = [runs.count(run) for run in runs]
    if not runs or max(counts) < 2:
        assert top_run(hashes, lengths, length) == 0
        return
    best = {
        sum(n + 1 for n in range(runs.index(run), runs.index(run) + length)) * count / total
        for run, count in zip(runs, counts, strict=True)
        if count == max(counts)
    }
    assert any(top_run(hashes, lengths, length) == pytest.approx(value) for value in best)


def test_repeated_parts() -> None:
    """Share of parts and of characters."""
    assert repeated_parts(["a", "bb", "a", "a"]) == (0.5, 0.4)
    assert repeated_parts([]) == (0, 0)


def test_labels_follow_the_file() -> None:
    """A suffix that says what a file is counts more than its looks; a text's looks count where it says nothing."""
    assert domains.label(Measures(PROSE), ".py") == "code"
    assert domains.label(Measures(PROSE), ".tex") == "mathematics"
    assert domains.label(Measures(CODE), ".md") == "code"
    assert domains.label(Measures("word " * 100), "") == "web"
