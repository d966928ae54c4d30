"""Log lines: format, one handler, first rank only."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from openk3.runtime.device import Rank
from openk3.runtime.log import setup_logging


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, put back afterwards."""
    logger = logging.getLogger("openk3")
    saved = (list(logger.handlers), logger.level, logger.propagate)
    yield logger
    logger.handlers[:], logger.propagate = saved[0], saved[2]
    logger.setLevel(saved[1])


def test_lines(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages alone, warnings marked, debug left out, nothing twice after a second set-up."""
    setup_logging()
    setup_logging()
    child = logging.getLogger("openk3.train.pretrain")
    child.debug("hidden")
    child.info("step %d", 3)
    child.warning("odd")
    assert capsys.readouterr().out.splitlines() == ["step 3", "warning: odd"]


def test_other_ranks_only_warn(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight ranks would say everything eight times."""
    setup_logging(rank=Rank(1, 1, 8))
    logger.info("quiet")
    logger.warning("loud")
    assert capsys.readouterr().out.splitlines() == ["warning: loud"]
