"""Domain labels: web, code, mathematics or knowledge, from where a text comes and from what it looks like."""

from __future__ import annotations

import re
from collections.abc import Sequence

from openk3.data.prepare.inputs import CODE_SUFFIXES, MATHEMATICS_SUFFIXES

CODE_SHARE = 0.35  # lines that look like code
MATHEMATICS_RATE = 0.02  # formulas, symbols and terms per word
WEB_LINES = 400  # lines looked at

_CODE_LINE = re.compile(
    r"^\s*(?:(?:def|class|import|from|return|elif|else|try|except|for|while|if|with|fn|func|let|const|var|struct|enum"
    r"|package|using|namespace|public|private|protected|static|void|int|impl|use|pub|end|#include|#define|#if|@)\b.*"
    r"[:;{}()=]\s*$|.*[;{}]\s*$|\s*[)\]}]+[,;]?\s*$|//|/\*|\*/|#!|<\?php|.*\w\(.*\)\s*$|[\w.\[\]]+\s*[-+*/|&]?=\s*\S)"
)
_FORMULA = re.compile(
    r"\\(?:frac|sum|int|begin|end|left|right|mathbb|mathcal|mathrm|alpha|beta|gamma|delta|epsilon|lambda|sigma|theta"
    r"|cdot|leq|geq|infty|partial|in|to|sqrt|prod|lim|forall|exists|label|ref|subset)\b"
    r"|\$[^$\n]{1,200}\$|[\u2200-\u22ff\u2190-\u21ff\u00b1\u00d7\u00f7]"
)
_MATHEMATICAL = re.compile(
    r"\b(?:theorem|lemma|corollary|proof|proposition|equation|integral|polynomial|derivative|matrix|matrices|eigenvalues?"
    r"|vector space|convergen(?:t|ce)|homomorphism|isomorphi[cs]m?|topolog(?:y|ical)|bijecti(?:on|ve)|prime numbers?"
    r"|algebraic|differentiable|continuous function|probability distribution|congruent|denominator|numerator"
    r"|hypotenuse|quadratic)\b",
    re.IGNORECASE,
)
_WEB = re.compile(
    r"https?://|www\.|\bclick here\b|\bsubscribe\b|\bsign (?:up|in)\b|\blog ?in\b|\bcookies?\b|\bprivacy policy\b"
    r"|\bcopyright \u00a9|\u00a9|\bshopping cart\b|\badd to cart\b|\bfree shipping\b|\bread more\b"
    r"|\bshare (?:this|on)\b|\bcomments?\b|\bposted (?:by|on|in)\b|\bblog\b|\bonline\b"
    r"|\bour (?:website|team|services|products|customers)\b"
    r"|\bemail\b|\bnewsletter\b|\bfollow us\b|\bfacebook\b|\btwitter\b|\byoutube\b",
    re.IGNORECASE,
)
_PERSONAL = re.compile(r"\b(?:I|I'm|I've|you|your|you're|we|our|us|my|me)\b", re.IGNORECASE)
_KNOWLEDGE = re.compile(
    r"\b(?:1[0-9]{3}|20[0-9]{2})\b|\b[12]?\d(?:st|nd|rd|th)? century\b|\b(?:is|are|was|were) (?:an?|the|one of)\b"
    r"|\b(?:known as|referred to as|defined as|consists? of|for example|such as|according to|et al\.|i\.e\.|e\.g\."
    r"|discovered|invented|species|chapter|century|theory|therefore|however|although|whereas)\b|\[\d+\]|\(\d{4}\)",
    re.IGNORECASE,
)


def looks_like_code(lines: Sequence[str]) -> bool:
    """Whether enough of the lines do."""
    looked = [line for line in lines[:WEB_LINES] if line.strip()]
    if len(looked) < 3:
        return False
    return sum(bool(_CODE_LINE.match(line[:300])) for line in looked) > CODE_SHARE * len(looked)


def label(text: str, lines: Sequence[str], num_words: int, suffix: str) -> str:
    """The domain of a text: by the file's suffix where that says it, else by counting marks of each domain.

    In this order: code if a third of the lines look like it; mathematics if formulas, symbols and terms make 2 % of the
    words; else knowledge or web, whichever has more marks (definitions, years, references against links, invitations
    and the first and second person); web where neither has any.
    """
    if suffix in CODE_SUFFIXES:
        return "code"
    if suffix in MATHEMATICS_SUFFIXES:
        return "mathematics"
    if looks_like_code(lines):
        return "code"
    looked = text[:20_000]
    words = max(1, min(num_words, len(looked) // 4))
    formulas, terms = len(_FORMULA.findall(looked)), len(_MATHEMATICAL.findall(looked))
    if formulas + terms >= MATHEMATICS_RATE * words and formulas + terms >= 3:
        return "mathematics"
    web = 3 * len(_WEB.findall(looked)) + 0.5 * len(_PERSONAL.findall(looked))
    return "knowledge" if len(_KNOWLEDGE.findall(looked)) > web else "web"
