"""Find memory of barriers that a Gluon kernel uses for something else, in its TTGIR.

A barrier that has been waited for may be dead to the compiler, but it is not to the machine until it is invalidated:
when another process takes its turn on the GPU its words are written back, over whatever lies there by then.
"""

from __future__ import annotations

import re
import tempfile
from math import prod
from pathlib import Path

BARRIER = re.compile(r"(%\w+) = ttg\.local_alloc .*allocation\.offset = (\d+).*memdesc<([\dx]+)xi64")
BUFFER = re.compile(r"ttg\.local_alloc .*-> !ttg\.memdesc<([\dx]+)x[a-z]+(\d+),")


def placed(ttgir: str) -> str:
    """The same program with the place of every buffer and of all scratch memory."""
    from triton._C.libtriton import ir, nvidia

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(ttgir)
        context = ir.context()
        ir.load_dialects(context)
        nvidia.load_dialects(context)
        module = ir.parse_mlir_module(str(path), context)
        module.context = context
        manager = ir.pass_manager(context)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 83)
        manager.run(module, "allocate_shared_memory")
        return str(module)


def reused(ttgir: str) -> list[str]:
    """What is placed, after the last use of a barrier, where the barrier lies or before it as far as is known.

    The program does not say how large scratch memory is: any that begins at or before the barrier counts.
    """
    lines = placed(ttgir).splitlines()
    found = []
    for match in filter(None, map(BARRIER.search, lines)):
        name, low, shape = match[1], int(match[2]), match[3]
        high = low + 8 * prod(map(int, shape.split("x")))
        for line in lines[last_use(lines, name) + 1 :]:
            at = re.search(r"allocation\.offset = (\d+)", line)
            first = int(at[1]) if at else high
            buffer = BUFFER.search(line)
            end = first + prod(map(int, buffer[1].split("x"))) * int(buffer[2]) // 8 if buffer else high
            if first < high and end > low:
                found.append(f"the barrier at {low} may share its memory with what begins at {first}")
    return found


def last_use(lines: list[str], name: str) -> int:
    """Line of the last use of a value; one that warps take along is in use until they are done."""
    uses = [number for number, line in enumerate(lines) if re.search(rf"{re.escape(name)}\b", line)]
    taken = [number for number in uses if "ttg.warp_specialize" in lines[number]]
    if not taken:
        return uses[-1]
    indent = len(lines[taken[-1]]) - len(lines[taken[-1]].lstrip())
    return next(n for n in range(taken[-1] + 1, len(lines)) if re.match(rf" {{{indent}}}}} : ", lines[n]))
