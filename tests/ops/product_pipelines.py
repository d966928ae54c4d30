"""Find loops in which a copy overwrites what a product of Hopper's still reads, in Triton's own form of a kernel.

Triton 3.6 lets products of one round of a loop run on into the next, while copies fetch blocks for later rounds into
rings of slots. A ring needs one slot more than the copies run ahead; where a block is also read into registers Triton
does not give it that slot. Nothing but the time that a copy takes then keeps the result right.
"""

from __future__ import annotations

import re


def overwritten(ttgir: str) -> list[str]:
    """Rings of a kernel that are too short for its products in flight."""
    rings = re.findall(r"(%\S+) = ttg\.local_alloc.*-> !ttg\.memdesc<(\d+)x", ttgir)
    slots = {name: int(count) for name, count in rings}
    ring_of: dict[str, str] = {}
    ahead: dict[str, int] = {}
    found: list[str] = []
    depth, in_flight = 0, 0
    for line in ttgir.splitlines():
        depth += ("scf.for " in line) - ("scf.yield" in line and depth > 0)
        if match := re.search(r"(%\S+) = ttg\.memdesc_index (%\w+)\[", line):
            ring_of[match[1]] = match[2]
        elif "ttng.warp_group_dot_wait" in line:
            in_flight = min(in_flight, int(re.search(r"pendings = (\d+)", line)[1]))
        elif "ttng.warp_group_dot " in line:
            in_flight += "isAsync = true" in line
        elif match := re.search(r"ttg\.async_copy_global_to_local \S+, (%\w+)", line):
            ring = ring_of.get(match[1], match[1])
            if depth == 0:
                ahead[ring] = ahead.get(ring, 0) + 1
            elif in_flight and slots.get(ring, 1) <= ahead.get(ring, 0):
                found.append(f"ring {ring} of {slots.get(ring, 1)} slots is overwritten while products read it")
        if depth == 0:
            in_flight = 0
    return found
