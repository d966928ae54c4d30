"""Flags that benchmarks of rows have in common: which rows, where, how thoroughly, and the file to write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parse(
    purpose: str | None,
    arguments: Sequence[str] | None,
    *,
    small: str = "tiny shapes, to try the script",
    quick: str = "median of 5 after 2",
    peers: bool = False,
) -> argparse.Namespace:
    """Options of a script with this docstring; `small` and `quick` say what these flags do there.

    With `peers`, packages of the folder named by --peers are imported before installed ones.
    """
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of names; rows that contain one are measured")
    if peers:
        parser.add_argument("--peers", type=Path, help="folder with packages of peers, put before the installed ones")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the script")
    parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    if peers and options.peers is not None:
        sys.path.insert(0, str(options.peers))
    return options
