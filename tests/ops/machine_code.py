"""Machine code of a kernel for Hopper: its blocks, the ways between them, and the uniform registers that they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """Instructions that run one after another, and the numbers of the blocks that may come next."""

    lines: list[str]
    following: list[int]


def disassembled(cubin: bytes) -> str:
    """A line for each label (`.L_x_1:`) and each instruction (a tab first), which names all targets of a jump."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.check_output([knobs.nvidia.nvdisasm.path, "-c", str(path)], text=True)
    lines = []
    for line in text.splitlines():
        if match := re.match(r"\s*/\*\w{4,}\*/\s+(.*;)", line):
            lines.append("\t" + re.sub(r"\s+", " ", match[1]).replace(" ;", ";"))
        elif re.match(r"\S+:\s*$", line):
            lines.append(line.strip())
    return inlined(lines)


def inlined(lines: list[str]) -> str:
    """The program with each routine in place of its calls: what a caller has written is known behind the call, too."""
    starts = [n for n, line in enumerate(lines) if re.match(r"[^\s.]\S*:$", line)]
    pieces = [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)])]
    routines = {piece[0][:-1]: piece[1:] for piece in pieces}
    calls = 0

    def expanded(body: list[str]) -> Iterator[str]:
        nonlocal calls
        for line in body:
            match = re.match(r"\t(@\S+ )?CALL\S* `\((.*)\);", line)
            if not match:
                yield line
                continue
            calls += 1
            mark = f"_{calls}"
            routine = "\n".join(expanded(routines[match[2]]))
            for label in re.findall(r"^(\.\S+):$", routine, re.MULTILINE):
                routine = re.sub(re.escape(label) + r"(?![\w$])", label + mark, routine)
            if match[1]:
                yield f"\t{match[1]}BRA `(.L_call{mark});"
                yield f"\tBRA `(.L_back{mark});"
                yield f".L_call{mark}:"
            yield from re.sub(r"\t(@\S+ )?RET\b.*;", rf"\t\1BRA `(.L_back{mark});", routine).splitlines()
            yield f".L_back{mark}:"

    return "\n".join(expanded(pieces[0])) + "\n"


def blocks_of(text: str) -> list[Block]:
    """A program cut at its labels and jumps."""
    pieces: list[list[str]] = [[]]
    places: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(r"([^\s:]+):$", line):
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
            targets = [places[name] for name in re.findall(r"[.$\w]+", match[4]) if name in places]
            always = not match[1] and (match[2] != "BRA" or not (match[3] or "," in match[4]))
            following = targets if always else following + targets
        blocks.append(Block(lines, following))
    return blocks


def uniform(line: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads, and those that it writes, perhaps."""
    match = re.search(r"\t(?:@\S+ )?([A-Z]\S*) (.*);", line)
    if not match:
        return set(), set()
    operation, operands = match[1], match[2].replace(".reuse", "").split(", ")
    while operands and re.fullmatch(r"!?U?P[\dT]", operands[0]):
        operands.pop(0)
    written: set[int] = set()
    makes = operation.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX"))
    if makes and operands and (target := re.fullmatch(r"UR(\d+|Z)", operands[0])):
        operands.pop(0)
        if target[1] != "Z":
            wide = operation.endswith(".64") or ".WIDE" in operation
            written = {int(target[1]) + i for i in range(1 + wide)}
    read: set[int] = set()
    from_registers = re.search(r"HGMMA\S* R\d+, R\d+,", line)
    for kind, low in re.findall(r"(g?desc\[)?\bUR(\d+)", ", ".join(operands)):
        first = int(low) + (2 if kind == "gdesc[" and from_registers else 0)
        pair = kind or (operation.startswith("U") and operation.endswith(".64"))
        last = int(low) + (3 if kind == "gdesc[" else 1 if pair else 0)
        read |= set(range(first, last + 1))
    return read, written


def overwritten(line: str) -> list[str]:
    """The registers of single lanes that an instruction may write, rather too many than too few."""
    match = re.search(r"\t(?:@\S+ )?([A-Z]\S*) (?:!?U?P[\dT], )*R(\d+)\b(?!\.)", line)
    if not match or "SETP" in match[1]:
        return []
    operation, first = match[1], int(match[2])
    if product := re.match(r"HGMMA\.64x(\d+)x", operation):
        count = int(product[1]) // 2
    elif re.search(r"MMA|\.128|LDSM", operation):
        count = 4
    else:
        count = 2 if re.search(r"\.64|WIDE|CS2R|^D[A-Z]", operation) else 1
    return [f"R{first + i}" for i in range(count)]


def unwritten(text: str) -> list[str]:
    """Instructions that use uniform registers which nothing has written on some way that leads there.

    ptxas copies pairs of which one register is still to come: a copy that is not used is nothing wrong.
    """
    blocks = blocks_of(text)
    used = [[(*uniform(line), "\tUMOV " in line) for line in block.lines] for block in blocks]

    def behind(written: frozenset[int], read: set[int], now: set[int], copies: bool) -> frozenset[int]:
        return written - now if copies and read - written else written | now

    entering: dict[int, frozenset[int]] = {0: frozenset()}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        leaving = reduce(lambda written, line: behind(written, *line), used[number], entering[number])
        for following in blocks[number].following:
            before = entering.get(following)
            after = leaving if before is None else before & leaving
            if after != before:
                entering[following] = after
                waiting.append(following)
    found = []
    for number, written in entering.items():
        for line, (read, now, copies) in zip(blocks[number].lines, used[number]):
            if read - written and not copies:
                names = ", ".join(f"UR{n}" for n in sorted(read - written))
                found.append(f"nothing has written {names}, which this reads: {line.split(chr(9))[-1]}")
            written = behind(written, read, now, copies)
    return found
