"""Compare the shared-memory descriptors of Hopper's matrix products in PTX with those in what ptxas made of it.

ptxas 12.8 can lose the base of a descriptor: where two buffers follow each other at one address and both are operands,
a later step of a product read at an address made of a kernel argument, or of a register that nothing had written. That
shows only on a GPU, as garbage. Here the instructions that make descriptors are computed on both sides, those of the
machine along every way through the program, loops included. Where PTX makes a descriptor of nothing unknown it must be
the same number; where it is that of a slot of a ring, what is added to the slot's address must be the same.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import takewhile
from typing import NamedTuple

from machine_code import blocks_of, overwritten, uniform

WORD, WIDE = 2**32 - 1, 2**64 - 1
BASE = 0x400  # where a block's shared memory begins
SLOT = 2**14 - 1  # the bits of an address in a descriptor
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


class Slot(NamedTuple):
    """An address of 14 bits that is not known, and what has been added to it."""

    more: int


Value = int | Slot | None
Operands = tuple[Value, Value]


def lut(table: int, x: int, y: int, z: int) -> int:
    """Any function of three bits, for all bits of three words."""
    parts = ((x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z) for i in range(8) if table >> i & 1)
    return reduce(operator.or_, parts, 0) & WORD


def total(parts: list[Value], mask: int) -> Value:
    """A sum of numbers and of one slot's address at most."""
    slots = [x for x in parts if isinstance(x, Slot)]
    numbers = sum(x.more if isinstance(x, Slot) else x for x in parts) & mask
    return numbers if not slots else Slot(numbers) if len(slots) == 1 else None


def joined(x: Value, y: Value) -> Value:
    """x | y, where one of them is a slot's address and the other has none of its bits."""
    slot, number = (x, y) if isinstance(x, Slot) else (y, x)
    apart = isinstance(slot, Slot) and is_number(number) and not (slot.more | number) & SLOT
    return Slot(slot.more | number) if apart else None


def cut(x: Value, bits: int) -> Value:
    """The lowest bits of a value."""
    return x & bits if is_number(x) else Slot(0) if bits == SLOT else None


def of_ptx(text: str) -> list[Operands]:
    """The descriptors of each product in order; None where an operand is in registers or depends on what is unknown."""
    written = re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]\S*)\s+(%\w+|\{[^}]*\}), (.*);", text, re.MULTILINE)
    sources: dict[str, list[tuple[str, list[str]]]] = {}
    for operation, targets, operands in written:
        for target in re.findall(r"%\w+", targets):  # several in braces, even one of a load: made of what is unknown
            made = (operation, operands.split(", ")) if target == targets else ("elsewhere", [targets])
            sources.setdefault(target, []).append(made)
    known: dict[str, Value] = {"global_smem": BASE}

    def value(name: str) -> Value:
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
            return int(name, 0) & WIDE
        if name not in known:
            known[name] = None
            found = [
                of_instruction(operation, [value(x) for x in operands]) for operation, operands in sources.get(name, [])
            ]
            known[name] = found[0] if found and all(x == found[0] for x in found) else None
        return known[name]

    pairs = []
    for operands in re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (.*);", text):
        first, second = re.sub(r"\{[^}]*\}", "registers", operands).split(", ")[:2]
        pairs.append((None if first == "registers" else value(first), value(second)))
    return pairs


def of_instruction(operation: str, x: list[Value]) -> Value:
    """What an instruction of PTX makes."""
    kind, mask = operation.split(".")[0], WIDE if "64" in operation else WORD
    if kind == "bfe" and x[1:] == [4, 14]:
        return cut(x[0] >> 4 if is_number(x[0]) else None, SLOT)
    if kind == "and" and SLOT in x:
        return cut(x[1] if x[0] == SLOT else x[0], SLOT)
    if None in x:
        return None
    if kind in ("mov", "cvt", "cvta", "shfl"):
        return x[0] & mask if is_number(x[0]) else x[0]
    if kind == "add":
        return total(x, mask)
    if not all(map(is_number, x)):
        return joined(*x) if kind == "or" else None
    if kind == "bfe":
        return (x[0] >> x[1]) & ((1 << x[2]) - 1)
    if kind == "mad":
        return (x[0] * x[1] + x[2]) & mask
    if kind == "lop3":
        return lut(x[3], *x[:3])
    return BINARY[kind](*x) & mask if kind in BINARY and len(x) == 2 else None


@dataclass
class Registers:
    """Registers and carries somewhere in a program: a word, a slot's address, ARGUMENT, MIXED, None where unknown."""

    words: dict[str, Value] = field(default_factory=lambda: {"URZ": 0, "RZ": 0, "UPT": 1, "PT": 1})

    def copy(self) -> Registers:
        """The same, to be changed."""
        return Registers(dict(self.words))

    def joined(self, other: Registers) -> Registers:
        """What is known where two ways meet."""
        return Registers({name: met(x, other.words.get(name)) for name, x in self.words.items()})

    def word(self, name: str) -> Value:
        """A register or a number."""
        if match := re.fullmatch(r"c\[0x0\]\[(0x\w+)\]", name):
            return ARGUMENT if int(match[1], 16) >= 0x210 else None
        if re.fullmatch(r"-?0x\w+", name):
            return int(name, 16) & WORD
        x = self.words.get(name.lstrip("-~!"))
        if name[0] == "!":
            return 1 - x if x in (0, 1) else None
        if name[0] in "-~":
            x = (-x if name[0] == "-" else ~x) & WORD if is_number(x) else worst([x])
        return x

    def pair(self, low: str) -> Value:
        """Two registers as one number, or a number."""
        if low == "URZ" or re.fullmatch(r"-?0x\w+", low):
            return 0 if low == "URZ" else int(low, 16)
        first = int(re.search(r"\d+", low)[0])
        parts = [self.words.get(f"UR{first}"), self.words.get(f"UR{first + 1}")]
        if not all(is_known(x) for x in parts) or isinstance(parts[1], Slot):
            return worst(parts)
        x = total([parts[0], parts[1] << 32], WIDE)
        return x if low[0] != "-" else -x & WIDE if is_number(x) else None

    def step(self, line: str) -> None:
        """One line of a program."""
        match = re.search(r"\t(@\S+ )?([A-Z]\S*) (.*);", line)
        if not match:
            return
        guard, operation, operands = match[1], match[2], match[3].replace(".reuse", "").split(", ")
        changed: dict[str, Value] = dict.fromkeys(f"UR{n}" for n in uniform(line)[1])
        changed |= dict.fromkeys(overwritten(line))
        leading = list(takewhile(is_predicate, operands))
        target, *rest = operands[len(leading) :] or [""]
        carries = list(takewhile(is_predicate, rest))
        changed |= dict.fromkeys(leading + carries)
        if target in changed and not guard and not leading:
            self.make(changed, operation, target, rest[len(carries) :], carries)
        self.words |= {name: x for name, x in changed.items() if name not in ("UPT", "PT", "URZ", "RZ")}

    def make(self, changed: dict[str, Value], operation: str, target: str, rest: list[str], carries: list[str]) -> None:
        """The results of one instruction, if it makes one of those that descriptors are made of."""
        if operation == "ULDC.64":
            changed |= dict.fromkeys(changed, self.word(rest[0]))
        elif operation == "CS2R" and rest == ["SRZ"]:  # two registers at once
            changed |= dict.fromkeys(changed, 0)
        elif operation == "UIADD3.64":
            x = [self.pair(name) for name in rest if name != "URZ"]
            made = total(x, WIDE) if all(map(is_known, x)) else worst(x)
            low = made & WORD if is_number(made) else Slot(made.more & WORD) if isinstance(made, Slot) else made
            high = made >> 32 if is_number(made) else made.more >> 32 if isinstance(made, Slot) else made
            changed |= {target: low, f"UR{int(target[2:]) + 1}": high}
        else:
            x = [self.word(name) for name in rest if not is_predicate(name)]
            if operation.endswith(".X"):
                x.append(self.word(next(filter(is_predicate, rest), "!PT")))
            changed[target] = made_of(operation.lstrip("UV"), x)
            if carries and operation.endswith("IADD3"):
                sums = total(x, WIDE) if all(map(is_known, x)) else worst(x)
                changed[carries[0]] = 0 if isinstance(sums, Slot) else sums >> 32 if is_number(sums) else sums


def made_of(kind: str, x: list[Value]) -> Value:
    """The word that an instruction makes of others."""
    if kind == "LEA" and x[1:] == [BASE, 0x18]:  # a block without a cluster begins where any block does
        return BASE
    if kind == "SGXT.U32":
        return cut(x[0], (1 << x[1]) - 1) if is_number(x[1]) else worst(x)
    if kind == "LOP3.LUT" and x[2:] == [0, 0xC0] and SLOT in x[:2]:
        return cut(x[0] if x[1] == SLOT else x[1], SLOT)
    if not all(map(is_known, x)):
        return worst(x)
    if kind in ("MOV", "LDC", "R2UR"):
        return x[0]
    if kind in ("IADD", "IADD3", "IADD3.X"):
        return total(x, WORD)
    if kind in ("IMAD.U32", "IMAD.MOV.U32", "IMAD.X") and x[:2] == [0, 0]:
        return total(x[2:], WORD)
    if kind == "LOP3.LUT" and x[2:] == [0, 0xFC] and not all(map(is_number, x)):
        return joined(*x[:2])
    return made_of_numbers(kind, x) if all(map(is_number, x)) else None


def made_of_numbers(kind: str, x: list[int]) -> int | None:
    """The word that an instruction makes of known ones."""
    match kind:
        case "SHF.R.U32.HI":
            return x[2] >> (x[1] & 31)
        case "SHF.L.U32":
            return x[0] << (x[1] & 31) & WORD
        case "IMAD" | "IMAD.SHL.U32":
            return (x[0] * x[1] + x[2]) & WORD
        case "LEA":
            return ((x[0] << x[2]) + x[1]) & WORD
        case "LEA.HI":
            return ((x[0] << x[3] >> 32) + x[1]) & WORD
        case "LOP3.LUT":
            return lut(x[3], *x[:3])
    return None


def is_number(x: Value) -> bool:
    """Whether a value is one number."""
    return isinstance(x, int) and x >= 0


def is_known(x: Value) -> bool:
    """Whether a value is one number, or made of a slot's address."""
    return is_number(x) or isinstance(x, Slot)


def is_predicate(name: str) -> bool:
    """Whether an operand is one of a condition, or a carry."""
    return re.fullmatch(r"!?U?P[\dT]", name) is not None


def worst(parts: list[Value]) -> int | None:
    """What is made of values that are not all known."""
    return ARGUMENT if ARGUMENT in parts else None if None in parts else MIXED if MIXED in parts else None


def met(x: Value, y: Value) -> Value:
    """What is known of a value that is x along some ways and y along others."""
    if x == y or is_one_of(x, y):
        return x
    return y if is_one_of(y, x) else None if None in (x, y) else MIXED


def is_one_of(slot: Value, x: Value) -> bool:
    """Whether a number is the address of some slot, with what has been added."""
    return isinstance(slot, Slot) and is_number(x) and 0 <= x - slot.more <= SLOT


def of_sass(text: str) -> Iterator[Operands]:
    """The same of the machine's instructions."""
    blocks = blocks_of(text)
    entering: dict[int, Registers] = {0: Registers()}
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
        state = entering.get(number, Registers()).copy()
        for line in block.lines:
            if match := re.search(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", line):
                low = int(match[2])
                yield None if match[1] else state.pair(f"UR{low}"), state.pair(f"UR{low + 2}")
            state.step(line)


def paired(asked: list[Operands], made: list[Operands]) -> list[tuple[Operands, Operands]]:
    """What PTX asks for and what came of it, in PTX's order; parts of the program may follow each other otherwise."""

    def fits(want: Operands, got: Operands) -> bool:
        return all(x is None or x == y or is_one_of(x, y) for x, y in zip(want, got))

    if all(map(fits, asked, made)):
        return list(zip(asked, made))
    found: dict[int, Operands] = {}
    rest = dict(enumerate(made))
    for n in sorted(range(len(asked)), key=lambda n: asked[n].count(None)):
        place = next((m for m, got in rest.items() if fits(asked[n], got)), None)
        if place is not None:
            found[n] = rest.pop(place)
    left = list(rest.values())
    return [(want, found[n] if n in found else left.pop(0)) for n, want in enumerate(asked)]


def compare(ptx: str, sass: str) -> tuple[int, list[str]]:
    """How many descriptors of products PTX makes of nothing unknown, and those that did not become what it asks for."""
    if "wgmma.mma_async" not in ptx:
        return 0, []
    asked, made = of_ptx(ptx), list(of_sass(sass))
    if len(asked) != len(made):
        return 0, [f"{len(asked)} products in PTX, {len(made)} in SASS"]
    both = [(n, want, got) for n, pair in enumerate(paired(asked, made)) for want, got in zip(*pair)]
    known = [(n, want, got) for n, want, got in both if want is not None]
    wrong = [f"product {n}: {spoken(x)} has become {spoken(y)}" for n, x, y in known if x != y and not is_one_of(x, y)]
    return len(known), wrong


def spoken(x: Value) -> str:
    """A value in words."""
    if isinstance(x, Slot):
        return f"a slot + {x.more:#x}"
    return {None: "something unknown", ARGUMENT: "an argument", MIXED: "one thing or another"}.get(x) or hex(x)
