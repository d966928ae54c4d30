"""Constraints: which tokens a turn may go on with, by a grammar that llguidance follows inside the engine's step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import llguidance.tiktoken
import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.xtml import CLOSE, END
from openk3.serve.grammar import TurnRules, turn_grammar

MAX_KEPT = 64  # compiled grammars
MAX_GRAMMAR = 2**20  # characters of one


class GrammarError(ValueError):
    """A schema or declaration that cannot be followed; one line that says why."""


class Constraints:
    """Compiles grammars for one tokenizer, from any thread, and keeps the last ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._words: llguidance.LLTokenizer | None = None
        self._thinking_V: Tensor | None = None

    def follow(self, rules: TurnRules) -> TurnConstraint:
        """A fresh constraint for one answer. Raises GrammarError for a schema that llguidance does not know."""
        try:
            text = turn_grammar(rules)
        except RecursionError:
            raise GrammarError("the schema is nested too deeply") from None
        if len(text) > MAX_GRAMMAR:
            raise GrammarError(f"the schema makes a grammar of more than {MAX_GRAMMAR:,} characters; make it smaller")
        with self._lock:
            matcher = self._kept.pop(text, None)
            words = self._words = self._words or _words(self._tokenizer)
            if self._thinking_V is None:
                self._thinking_V = _thinking(self._tokenizer)
        if matcher is None:
            matcher = LLMatcher(words, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        with self._lock:
            self._kept[text] = matcher
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        close = self._tokenizer.special[CLOSE] if rules.thinking else None
        return TurnConstraint(matcher.deep_copy(), self._tokenizer.vocab_size, close, self._thinking_V)


class TurnConstraint:
    """`engine/request.py: Constraint` of one answer: reasoning is any text up to `close`, then the grammar holds."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, close: int | None, thinking_V: Tensor) -> None:
        self._matcher, self._close, self._thinking_V = matcher, close, thinking_V
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, np.int32)
        self._followed: list[int] = []  # tokens that the matcher has seen
        self._start: int | None = 0 if close is None else None  # of the grammar's part of the answer
        self._looked = 0  # tokens of the answer that are known to be reasoning

    def allowed(self, answer: Sequence[int]) -> Tensor:
        """bool [V]; the answer may be shorter than the last time. Raises GrammarError where the grammar is left."""
        if self._close is not None and (self._start is None or self._start > len(answer)):
            self._find_start(answer)
        if self._start is None:
            return self._thinking_V
        self._follow(answer[self._start :])
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher.get_error()))
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        return torch.from_numpy(bits.astype(np.bool_))

    def _find_start(self, answer: Sequence[int]) -> None:
        self._looked = min(self._looked, len(answer))
        found = next((n for n in range(self._looked, len(answer)) if answer[n] == self._close), None)
        self._start = None if found is None else found + 1
        self._looked = len(answer) if found is None else found

    def _follow(self, tokens: Sequence[int]) -> None:
        known = len(self._followed)
        if list(tokens[:known]) != self._followed:
            same = next((n for n, pair in enumerate(zip(tokens, self._followed)) if pair[0] != pair[1]), len(tokens))
            self._matcher.rollback(known - same)
            del self._followed[same:]
        for token in tokens[len(self._followed) :]:
            if not self._matcher.consume_token(token):
                raise GrammarError(_reason(self._matcher.get_error()))
            self._followed.append(token)


def _words(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    return llguidance.tiktoken.lltokenizer_from_encoding(
        tokenizer.encoding, n_vocab=tokenizer.vocab_size, eos_token=tokenizer.special[END]
    )


def _thinking(tokenizer: Tokenizer) -> Tensor:
    """Any text, and the marker that closes the channel."""
    allowed_V = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
    allowed_V[tokenizer.num_ranks :] = False
    allowed_V[tokenizer.special[CLOSE]] = True
    return allowed_V


def _reason(error: str) -> str:
    """llguidance's first line without its place in a grammar that the client never saw."""
    line = error.strip().splitlines()[0] if error.strip() else "the grammar cannot be followed"
    return line.split("failed to compile JSON schema: ")[-1][:300]
