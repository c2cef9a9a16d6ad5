"""`tokendance serve` as a real multi-process server on loopback, ended by its own process id."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tokendance.cli.model import ensure_model

START_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(folder: Path, *flags: str) -> Iterator[str]:
    """The address of a server with a two-layer model of random weights."""
    port, log = free_port(), folder / "log"
    arguments = ["--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}']
    arguments += ["--max-model-len", "1024", "--enforce-eager", "--port", str(port)]
    arguments += ["--served-model-name", "tiny", *flags]
    command = [Path(sys.executable).with_name("tokendance"), "serve", str(ensure_model())]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail("the server did not start:\n" + log.read_text()[-4000:])
