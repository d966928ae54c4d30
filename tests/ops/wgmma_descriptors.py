"""Compare the shared-memory descriptors of Hopper's matrix products in PTX with those in what ptxas made of it.

ptxas 12.8 can lose the base of a descriptor: where two buffers follow each other at one address and both are operands,
a later step of a product read at an address made of a kernel argument. That shows only on a GPU, as garbage. Here the
instructions that make descriptors are computed on both sides, as far as they depend on nothing unknown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator

WORD, WIDE = 2**32 - 1, 2**64 - 1
BASE = 0x400  # where a block's shared memory begins
ARGUMENT = -1  # made of a kernel argument
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


class Uniform:
    """Uniform registers along a program without loops: a word, ARGUMENT, or None where unknown."""

    def __init__(self) -> None:
        self.words: dict[int, int | None] = {}
        self.carries: dict[str, int] = {}

    def word(self, name: str) -> int | None:
        """A register or a number."""
        if name == "URZ":
            return 0
        if match := re.fullmatch(r"(-?)UR(\d+)", name):
            x = self.words.get(int(match[2]))
            return -x & WORD if match[1] and x not in (None, ARGUMENT) else x
        if match := re.fullmatch(r"c\[0x0\]\[(0x\w+)\]", name):
            return ARGUMENT if int(match[1], 16) >= 0x210 else None
        return int(name, 16) & WORD if re.fullmatch(r"-?0x\w+", name) else None

    def pair(self, low: int) -> int | None:
        """Two registers as one number."""
        parts = self.words.get(low), self.words.get(low + 1)
        if ARGUMENT in parts:
            return ARGUMENT
        return None if None in parts else parts[0] | parts[1] << 32

    def wide(self, name: str) -> int | None:
        """A register pair or a number."""
        if match := re.fullmatch(r"(-?)UR(\d+)", name):
            x = self.pair(int(match[2]))
            return -x if match[1] and x not in (None, ARGUMENT) else x
        return 0 if name == "URZ" else int(name, 16)

    def run(self, operation: str, target: int, operands: list[str]) -> None:
        """One instruction."""
        if operation == "UIADD3.64":
            x = [self.wide(name) for name in operands[:2]]
            total = ARGUMENT if ARGUMENT in x else None if None in x else sum(x) & WIDE
            plain = total not in (None, ARGUMENT)
            self.words[target], self.words[target + 1] = (total & WORD, total >> 32) if plain else (total, total)
            return
        predicates = [name for name in operands if re.fullmatch(r"!?UP\w", name)]
        x = [self.word(name) for name in operands if name not in predicates]
        self.words[target] = ARGUMENT if ARGUMENT in x else None if None in x else self.result(operation, x, predicates)

    def result(self, operation: str, x: list[int], predicates: list[str]) -> int | None:
        """A word made of known ones."""
        match operation:
            case "UMOV" | "ULDC":
                return x[0]
            case "UIADD3" | "UIADD3.X":
                carried = [self.carries.get(name, 0) for name in predicates] if operation == "UIADD3.X" else [0]
                total = sum(x[:3]) + carried[0] if carried else sum(x[:3])
                if operation == "UIADD3" and predicates:
                    self.carries[predicates[0]] = total >> 32
                return total & WORD
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


def of_sass(text: str) -> Iterator[tuple[int | None, ...]]:
    """The same of the machine's instructions."""
    state = Uniform()
    for line in text.splitlines():
        if match := re.search(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", line):
            low = int(match[2])
            yield None if match[1] else state.pair(low), state.pair(low + 2)
        elif match := re.search(r"\t(@\S+ )?(U\S+|R2UR\S*) UR(\d+), (.*);", line):
            operation, target, operands = match[2], int(match[3]), match[4].replace(".reuse", "").split(", ")
            if match[1] or operation.startswith("R2UR"):
                state.words[target] = None
            elif operation == "ULEA" and operands[0].startswith("UR") and operands[-1] == "0x18":
                state.words[target] = BASE
            elif operation == "ULDC.64":
                state.words[target] = state.words[target + 1] = state.word(operands[0])
            else:
                state.run(operation, target, operands)


def has_loop(ptx: str) -> bool:
    """Whether any jump goes back, as far as products are made."""
    body = ptx[: ptx.rfind("wgmma.mma_async")]
    labels = {name: match.start() for match in re.finditer(r"^(\$\w+):", body, re.MULTILINE) for name in [match[1]]}
    return any(labels.get(m[1], m.start()) < m.start() for m in re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", body))


def differences(ptx: str, sass: str) -> list[str]:
    """Products whose descriptors are not those of the PTX; empty for programs with loops, which are not followed."""
    if "wgmma.mma_async" not in ptx or has_loop(ptx):
        return []
    wanted, made = of_ptx(ptx), list(of_sass(sass))
    if len(wanted) != len(made):
        return [f"{len(wanted)} products in PTX, {len(made)} in SASS"]
    return [
        f"product {n}: {want:#x} has become {'an argument' if got == ARGUMENT else hex(got)}"
        for n, pairs in enumerate(zip(wanted, made))
        for want, got in zip(*pairs)
        if want is not None and got is not None and want != got
    ]
