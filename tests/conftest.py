"""Settings of all tests."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # Wall time of one example says nothing on a machine that does other work too.
    settings.register_profile("tokendance", deadline=None)
    settings.load_profile("tokendance")
