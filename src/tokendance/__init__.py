"""TokenDance: collective KV cache reuse for multi-agent rounds, an add-on for vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tokendance")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"
