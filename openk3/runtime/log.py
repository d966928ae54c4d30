"""Logging: one format, first rank only, and lines that do not tear the progress bar."""

from __future__ import annotations

import logging

from tqdm import tqdm

from openk3.runtime.device import Rank


class _BesideBar(logging.Handler):
    """Prints above a running progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))


def setup_logging(level: int = logging.INFO, rank: Rank | None = None) -> None:
    """Send the package's log lines to the terminal; ranks other than the first only warn. Calling it again is safe."""
    logger = logging.getLogger("openk3")
    for handler in list(logger.handlers):
        if isinstance(handler, _BesideBar):
            logger.removeHandler(handler)
    handler = _BesideBar()
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    logger.setLevel(level if (rank or Rank.from_env()).is_first else max(level, logging.WARNING))
    logger.propagate = False


class _Format(logging.Formatter):
    """The message alone; warnings and errors say so first."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"
