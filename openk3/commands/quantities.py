"""Lines of tables, and numbers with a prefix."""

from __future__ import annotations


def row(label: str, value: str, note: str = "") -> list[str]:
    """One line of a table."""
    return [f"  {label:<46} {value:>20}  {note}".rstrip()]


def quantity(value: float, unit: str, step: int = 1024) -> str:
    """A number of bytes or FLOPs with a prefix, for example 25.33 GiB."""
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi") if step == 1024 else ("", "K", "M", "G", "T", "P", "E")
    power = 0
    while value >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{value:,.2f} {prefixes[power]}{unit}"
