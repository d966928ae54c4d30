"""Domain labels: web, code, mathematics or knowledge, from where a text comes and from what it looks like."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from openk3.data.prepare.inputs import CODE_SUFFIXES, MATHEMATICS_SUFFIXES
from openk3.data.prepare.measures import Measures

CODE_SHARE = 0.35  # lines that look like code
MATHEMATICS_RATE = 0.02  # formulas, symbols and terms per word
LINES, CHARACTERS, TOKENS = 400, 20_000, 5_000  # looked at

_CODE_LINE = re.compile(
    r"^\s*(?:(?:def|class|import|from|return|elif|else|try|except|for|while|if|with|fn|func|let|const|var|struct|enum"
    r"|package|using|namespace|public|private|protected|static|void|int|impl|use|pub|end|#include|#define|#if|@)\b.*"
    r"[:;{}()=]\s*$|.*[;{}]\s*$|\s*[)\]}]+[,;]?\s*$|//|/\*|\*/|#!|<\?php|.*\w\(.*\)\s*$|[\w.\[\]]+\s*[-+*/|&]?=\s*\S)"
)
_COMMAND = re.compile(
    r"\\(?:frac|sum|int|begin|end|left|right|mathbb|mathcal|mathrm|alpha|beta|gamma|delta|epsilon|lambda|sigma|theta"
    r"|cdot|leq|geq|infty|partial|in|to|sqrt|prod|lim|forall|exists|label|ref|subset)\b"
)
_FORMULA = re.compile(r"\$[^$\n]{1,200}\$")
_SYMBOL = re.compile("[\u2190-\u21ff\u2200-\u22ff\u00b1\u00d7\u00f7]")
_YEAR = re.compile(r"1[0-9]{3}|20[0-9]{2}")
# Words by what they speak for; a word of the web weighs three times a word of knowledge, the personal ones half.
_MATHEMATICS = (
    "theorem lemma corollary proof proposition equation equations integral polynomial polynomials derivative matrix"
    " matrices eigenvalue eigenvalues convergent convergence homomorphism isomorphism isomorphic topology topological"
    " bijection bijective algebraic differentiable congruent denominator numerator hypotenuse quadratic"
)
_WEB = (
    "http https www subscribe login signup cookies cookie blog newsletter facebook twitter youtube instagram copyright"
    " website websites online email emails comment comments posted cart checkout shipping discount price prices"
)
_PERSONAL = "i you your we our us my me yours ours mine"
_KNOWLEDGE = (
    "century theory species chapter discovered invented therefore however although whereas known called defined"
    " consists consisted according became located founded published introduced developed originally typically usually"
)
_KINDS = {
    word: kind
    for kind, words in zip("mwpk", (_MATHEMATICS, _WEB, _PERSONAL, _KNOWLEDGE), strict=True)
    for word in words.split()
}
_WEB_PHRASES = ("click here", "read more", "sign up", "sign in", "log in", "privacy policy", "add to cart", "follow us")
_WEB_PHRASES += ("contact us", "our team", "our services", "our products", "our customers", "share this", "posted by")
_KNOWLEDGE_PHRASES = (" is a ", " is an ", " is the ", " are a ", " was a ", " was an ", " was the ", " were the ")
_KNOWLEDGE_PHRASES += (" one of the ", "known as", "referred to as", "for example", "such as", "et al.", "the first ")


def looks_like_code(lines: Sequence[str]) -> bool:
    """Whether enough of the lines do."""
    looked = [line for line in lines[:LINES] if line.strip()]
    if len(looked) < 3:
        return False
    return sum(bool(_CODE_LINE.match(line[:300])) for line in looked) > CODE_SHARE * len(looked)


def label(measures: Measures, suffix: str) -> str:
    """The domain of a text: by its file's suffix where that says it, else by counting marks of each domain.

    In this order: code if a third of the lines look like it; mathematics if formulas, symbols and terms make 2 % of the
    words; else knowledge or web, whichever has more marks (definitions, years, words of reference works against links,
    invitations and the first and second person); web where neither has any.
    """
    if suffix in CODE_SUFFIXES:
        return "code"
    if suffix in MATHEMATICS_SUFFIXES:
        return "mathematics"
    if looks_like_code(measures.all_lines):
        return "code"
    tokens, text, lower = measures.tokens[:TOKENS], measures.text[:CHARACTERS], measures.lower[:CHARACTERS]
    counts = Counter(map(_KINDS.get, tokens))
    formulas = counts["m"] + len(_SYMBOL.findall(text)) * (not text.isascii())
    formulas += len(_COMMAND.findall(text)) if "\\" in text else 0
    formulas += len(_FORMULA.findall(text)) if "$" in text else 0
    if formulas >= max(3, MATHEMATICS_RATE * len(tokens)):
        return "mathematics"
    web = 3 * (counts["w"] + sum(map(lower.count, _WEB_PHRASES))) + 0.5 * counts["p"]
    knowledge = counts["k"] + sum(map(lower.count, _KNOWLEDGE_PHRASES)) + len(_YEAR.findall(text))
    return "knowledge" if knowledge > web else "web"
