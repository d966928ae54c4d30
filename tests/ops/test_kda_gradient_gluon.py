"""The machine code of the Gluon gradients: products of tensor cores read the operands that were put there for them.

ptxas has lost an operand's address where registers of warps were scarce: the second half of a product then came from
anywhere, and nothing but a GPU would tell. Here the arithmetic on those registers is followed to each product.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COMPILER = Path(__file__).parent / "kernel_compile.py"
LINE = re.compile(r"\S+\s+(?P<predicate>@\S+\s+)?(?P<op>[\w.]+)\s+(?P<arguments>[^;]*);")
WORD, LONG = 2**32 - 1, 2**64 - 1


class Uniform:
    """Registers that a warp's threads share, as far as their values follow from where shared memory begins: at 0."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}
        self.carries: dict[str, int] = {}

    def read(self, name: str) -> int:
        """A register or a number; KeyError if not known."""
        sign, name = (-1, name[1:]) if name.startswith("-") else (1, name)
        if name == "URZ":
            return 0
        return sign * (self.values[int(name[2:])] if name.startswith("UR") else int(name, 0))

    def read_long(self, name: str) -> int:
        """Two registers, or a number."""
        sign, name = (-1, name[1:]) if name.startswith("-") else (1, name)
        if not name.startswith("UR") or name == "URZ":
            return sign * self.read(name)
        number = int(name[2:])
        return sign * (self.values[number + 1] << 32 | self.values[number])

    def step(self, op: str, arguments: list[str], known: bool) -> None:
        """Carry out one instruction whose result is such a register; what is not understood makes it unknown."""
        number, rest = int(arguments[0][2:]), arguments[1:]
        wide = op.endswith(".64")
        try:
            value = self.result(op, rest) if known else None
        except (KeyError, ValueError, IndexError):
            value = None
        for part in range(2 if wide else 1):
            self.values.pop(number + part, None)
            if value is not None:
                self.values[number + part] = value >> 32 * part & WORD

    def result(self, op: str, rest: list[str]) -> int | None:
        """What an instruction computes, or None."""
        if op == "UIADD3.64":
            return sum(self.read_long(x) for x in rest[:2]) & LONG
        if op == "UIADD3" and rest[0].startswith("UP"):
            total = sum(self.read(x) & WORD for x in rest[1:])
            self.carries[rest[0]] = total >> 32
            return total
        if op in ("UIADD3", "UIADD3.X"):
            return sum(self.read(x) for x in rest[:3]) + (self.carries[rest[3]] if op.endswith("X") else 0)
        if op == "UMOV":
            return self.read(rest[0])
        if op == "USHF.R.U32.HI":
            return (self.read(rest[2]) & WORD) >> int(rest[1], 0)
        if op == "USGXT.U32":
            return self.read(rest[0]) & (1 << int(rest[1], 0)) - 1
        return 0 if op == "ULEA" and rest[-1] == "0x18" else None  # the window of shared memory


def right_operands(sass: str) -> Iterator[tuple[bool, int | None]]:
    """(whether its left operand lies in registers, address of its right one) of each product, in order."""
    uniform = Uniform()
    for line in map(LINE.match, sass.splitlines()):
        if not line:
            continue
        arguments = [x.strip().removesuffix(".reuse") for x in line["arguments"].split(",")]
        if line["op"].startswith("HGMMA"):
            first = int(re.search(r"gdesc\[UR(\d+)\]", line["arguments"]).group(1))
            value = uniform.values.get(first + 2)
            yield not arguments[1].startswith("gdesc"), None if value is None else (value & 0x3FFF) << 4
        elif re.fullmatch(r"UR\d+", arguments[0]):
            uniform.step(line["op"], arguments, not line["predicate"])


def test_products_read_their_operands(tmp_path: Path) -> None:
    """Two k-steps of each of six products, whose right operands are three triangles of 2 kB, read by rows (then the
    second half of a row) or by columns (the second half of the rows); and three products with states, 8 k-steps each.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILER), "gradient_gluon", "--arch", "90", "--sass", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    products = list(right_operands((tmp_path / "gradient_kernel.0.sm_90.sass").read_text()))
    inside = [address for in_registers, address in products if in_registers]
    states = [address for in_registers, address in products if not in_registers]
    assert len(inside) == 12 and len(states) == 24 and None not in inside + states
    pairs = [(a, b - a) for a, b in zip(inside[::2], inside[1::2])]
    keys, scores, ones = pairs[0][0], pairs[2][0], pairs[4][0]
    assert len({keys, scores, ones}) == 3
    assert pairs == [(keys, 32), (keys, 1024), (scores, 1024), (scores, 32), (ones, 1024), (ones, 1024)]
    for product in (states[:8], states[8:16], states[16:]):
        assert [x - product[0] for x in product] == [0, 32, 64, 96, 4096, 4128, 4160, 4192]
