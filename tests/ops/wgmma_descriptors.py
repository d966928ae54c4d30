"""Compare the shared-memory descriptors of Hopper's matrix products in PTX with those in what ptxas made of it.

ptxas 12.8 can lose the base of a descriptor: where two buffers follow each other at one address and both are operands,
a later step of a product read at an address made of a kernel argument. That shows only on a GPU, as garbage. Here the
instructions that make descriptors are computed on both sides, as far as they depend on nothing unknown; those of the
machine along every way through the program, loops included.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

WORD, WIDE = 2**32 - 1, 2**64 - 1
BASE = 0x400  # where a block's shared memory begins
ARGUMENT = -1  # made of a kernel argument
MIXED = -2  # not the same along all ways that lead here
BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "shl": lambda x, y: x << (y & 63),
    "shr": lambda x, y: x >> (y & 63),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def lut(table: int, x: int, y: int, z: int) -> int:
    """Any function of three bits, for all bits of three words."""
    parts = ((x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z) for i in range(8) if table >> i & 1)
    total = 0
    for part in parts:
        total |= part & WORD
    return total


def of_ptx(text: str) -> list[tuple[int | None, ...]]:
    """The descriptors of each product in order; None where an operand is in registers or depends on what is unknown."""
    written = re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]\S*)\s+(%\w+), (.*);", text, re.MULTILINE)
    sources: dict[str, list[tuple[str, list[str]]]] = {}
    for operation, target, operands in written:
        sources.setdefault(target, []).append((operation, operands.split(", ")))
    known: dict[str, int | None] = {"global_smem": BASE}

    def value(name: str) -> int | None:
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
            return int(name, 0) & WIDE
        if name not in known:
            known[name] = None
            if len(sources.get(name, [])) == 1:
                operation, operands = sources[name][0]
                known[name] = computed(operation, [value(x) for x in operands])
        return known[name]

    def computed(operation: str, x: list[int | None]) -> int | None:
        kind, mask = operation.split(".")[0], WIDE if "64" in operation else WORD
        if any(part is None for part in x):
            return None
        if kind in ("mov", "cvt", "cvta", "shfl"):
            return x[0] & mask
        if kind == "bfe":
            return (x[0] >> x[1]) & ((1 << x[2]) - 1)
        if kind == "mad":
            return (x[0] * x[1] + x[2]) & mask
        if kind == "lop3":
            return lut(x[3], *x[:3])
        return BINARY[kind](*x) & mask if kind in BINARY and len(x) == 2 else None

    found = []
    for operands in re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (.*);", text):
        first, second = re.sub(r"\{[^}]*\}", "registers", operands).split(", ")[:2]
        found.append((None if first == "registers" else value(first), value(second)))
    return found


@dataclass
class Uniform:
    """Uniform registers somewhere in a program: a word, ARGUMENT, MIXED, or None where unknown."""

    words: dict[int, int | None] = field(default_factory=dict)
    carries: dict[str, int | None] = field(default_factory=lambda: {"UPT": 1})

    def copy(self) -> Uniform:
        """The same, to be changed."""
        return Uniform(dict(self.words), dict(self.carries))

    def joined(self, other: Uniform) -> Uniform:
        """What is known where two ways meet."""
        words = {name: met(x, other.words.get(name)) for name, x in self.words.items()}
        return Uniform(words, {name: met(x, other.carries.get(name)) for name, x in self.carries.items()})

    def word(self, name: str) -> int | None:
        """A register or a number."""
        if name == "URZ":
            return 0
        if match := re.fullmatch(r"(-?)UR(\d+)", name):
            x = self.words.get(int(match[2]))
            return -x & WORD if match[1] and is_number(x) else x
        if match := re.fullmatch(r"c\[0x0\]\[(0x\w+)\]", name):
            return ARGUMENT if int(match[1], 16) >= 0x210 else None
        return int(name, 16) & WORD if re.fullmatch(r"-?0x\w+", name) else None

    def pair(self, low: int) -> int | None:
        """Two registers as one number."""
        parts = [self.words.get(low), self.words.get(low + 1)]
        return parts[0] | parts[1] << 32 if all(map(is_number, parts)) else worst(parts)

    def wide(self, name: str) -> int | None:
        """A register pair or a number."""
        if match := re.fullmatch(r"(-?)UR(\d+)", name):
            x = self.pair(int(match[2]))
            return -x & WIDE if match[1] and is_number(x) else x
        return 0 if name == "URZ" else int(name, 16)

    def step(self, line: str) -> None:
        """One line of a program."""
        if match := re.search(r"\t(?:@\S+ )?\S+ ((?:!?UP\d, )+)", line):  # all but sums overwrite these
            self.carries |= dict.fromkeys(re.findall(r"UP\d", match[1]))
        match = re.search(r"\t(@\S+ )?(U\S+|R2UR\S*) UR(\d+), (.*);", line)
        if not match:
            return
        operation, target, operands = match[2], int(match[3]), match[4].replace(".reuse", "").split(", ")
        double = operation in ("ULDC.64", "UIADD3.64")
        if match[1] or operation.startswith("R2UR"):
            self.words[target] = None
            if double:
                self.words[target + 1] = None
        elif operation == "ULEA" and operands[0].startswith("UR") and operands[-1] == "0x18":
            self.words[target] = BASE
        elif operation == "ULDC.64":
            self.words[target] = self.words[target + 1] = self.word(operands[0])
        elif double:
            x = [self.wide(name) for name in operands[:2]]
            total = sum(x) & WIDE if all(map(is_number, x)) else worst(x)
            plain = is_number(total)
            self.words[target], self.words[target + 1] = (total & WORD, total >> 32) if plain else (total, total)
        else:
            predicates = [name for name in operands if re.fullmatch(r"!?UP\w", name)]
            x = [self.word(name) for name in operands if name not in predicates]
            if operation == "UIADD3.X":
                x.append(0 if predicates[:1] in ([], ["!UPT"]) else self.carries.get(predicates[0]))
            known = all(map(is_number, x))
            if operation == "UIADD3" and predicates:
                self.carries[predicates[0]] = sum(x[:3]) >> 32 if known else worst(x)
            self.words[target] = made_of(operation, x) if known else worst(x)


def made_of(operation: str, x: list[int]) -> int | None:
    """A word made of known ones."""
    match operation:
        case "UMOV" | "ULDC":
            return x[0]
        case "UIADD3" | "UIADD3.X":
            return sum(x) & WORD
        case "USHF.R.U32.HI":
            return x[2] >> x[1]
        case "USHF.L.U32":
            return x[0] << (x[1] & 31) & WORD
        case "USGXT.U32":
            return x[0] & ((1 << x[1]) - 1)
        case "ULEA.HI":
            return ((x[0] << x[3] >> 32) + x[1]) & WORD
        case "ULOP3.LUT":
            return lut(x[3], *x[:3])
    return None


def is_number(x: int | None) -> bool:
    """Whether a value is one number."""
    return x is not None and x >= 0


def worst(parts: list[int | None]) -> int | None:
    """What is made of values that are not all numbers."""
    return ARGUMENT if ARGUMENT in parts else None if None in parts else MIXED


def met(x: int | None, y: int | None) -> int | None:
    """What is known of a value that is x along some ways and y along others."""
    return x if x == y else None if None in (x, y) else MIXED


class Block(NamedTuple):
    """Instructions that run one after another, and the numbers of the blocks that may come next."""

    lines: list[str]
    following: list[int]


def blocks_of(text: str) -> list[Block]:
    """A program of the machine's, cut at its labels and jumps."""
    pieces: list[list[str]] = [[]]
    places: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(r"\s*(\.?L\w+):", line):
            if pieces[-1]:
                pieces.append([])
            places[match[1]] = len(pieces) - 1
        elif "\t" in line:
            pieces[-1].append(line)
            if re.search(r"\t(@\S+ )?(BRA|BRX|EXIT)\b", line):
                pieces.append([])
    blocks = []
    for number, lines in enumerate(pieces):
        following = [number + 1] if number + 1 < len(pieces) else []
        if lines and (match := re.search(r"\t(@\S+ )?(BRA|BRX|EXIT)(\S*) ?(.*);", lines[-1])):
            always = not (match[1] or match[3] or "," in match[4])
            following = [] if always else following
            if match[2] == "BRX":  # by a table
                following += places.values()
            elif (target := match[4].split(", ")[-1]) in places:  # code that only brings lanes together has no label
                following.append(places[target])
        blocks.append(Block(lines, following))
    return blocks


def of_sass(text: str) -> Iterator[tuple[int | None, ...]]:
    """The same of the machine's instructions."""
    blocks = blocks_of(text)
    entering: dict[int, Uniform] = {0: Uniform()}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        state = entering[number].copy()
        for line in blocks[number].lines:
            state.step(line)
        for following in blocks[number].following:
            before = entering.get(following)
            after = state if before is None else before.joined(state)
            if before is None or after != before:
                entering[following] = after
                waiting.append(following)
    for number, block in enumerate(blocks):
        state = entering.get(number, Uniform()).copy()
        for line in block.lines:
            if match := re.search(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", line):
                low = int(match[2])
                yield None if match[1] else state.pair(low), state.pair(low + 2)
            state.step(line)


def compare(ptx: str, sass: str) -> tuple[int, list[str]]:
    """How many descriptors of products are known on both sides, and those that are not what PTX asks for."""
    if "wgmma.mma_async" not in ptx:
        return 0, []
    asked, made = of_ptx(ptx), list(of_sass(sass))
    if len(asked) != len(made):
        return 0, [f"{len(asked)} products in PTX, {len(made)} in SASS"]
    both = [(n, want, got) for n, pairs in enumerate(zip(asked, made)) for want, got in zip(*pairs)]
    known = [(n, want, got) for n, want, got in both if want is not None and got is not None]
    names = {ARGUMENT: "an argument", MIXED: "one thing or another"}
    wrong = [f"product {n}: {x:#x} has become {names.get(y) or hex(y)}" for n, x, y in known if x != y]
    return len(known), wrong
