"""Settings of the whole suite: one thread per worker, and property tests that draw the same examples every time."""

from __future__ import annotations

import os

from hypothesis import settings

# Read by torch when it is imported, which no test module has done yet: two workers must not fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("openk3", deadline=None, derandomize=True)
settings.load_profile("openk3")
