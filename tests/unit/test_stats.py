"""`tokendance stats` against a page as a server serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tokendance.cli import main


def page() -> bytes:
    registry = CollectorRegistry()
    names = ["model_name", "engine"]
    rows = Counter("tokendance:rows", "x", [*names, "source"], registry=registry)
    for engine, source, count in (("0", "stored", 30), ("1", "stored", 12), ("0", "computed", 5)):
        rows.labels("m", engine, source).inc(count)
    held = Gauge("tokendance:store_bytes", "x", [*names, "kind"], registry=registry)
    held.labels("m", "0", "master").set(1000)
    moved = Counter("tokendance:restore_bytes", "x", [*names, "what"], registry=registry)
    moved.labels("m", "0", "written").inc(600)
    Counter("tokendance:restore_seconds", "x", names, registry=registry).labels("m", "0").inc(2)
    speed = Gauge("tokendance:copy_bytes_per_second", "x", names, registry=registry)
    speed.labels("m", "0").set(400)
    Counter("vllm:others", "x", names, registry=registry).labels("m", "0").inc(7)
    return generate_latest(registry)


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    pages = [page()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(pages[0])

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", pages
        server.shutdown()


def test_figures(server: tuple[str, list[bytes]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--url", server[0], "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == {"stored": 42, "computed": 5}
    assert figures["stored bytes"] == {"master": 1000}
    assert figures["restored"]["share_of_copy_bandwidth"] == pytest.approx(600 / 2 / 400)
    assert "failures" not in figures and "others" not in str(figures)
    assert main(["stats", "--url", server[0]]) == 0
    assert "42" in capsys.readouterr().out


def test_a_server_without_us(
    server: tuple[str, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    server[1][0] = b"# HELP vllm:x y\n"
    assert main(["stats", "--url", server[0]]) == 1
    assert "tokendance serve" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--url", "http://127.0.0.1:9"]) == 1
    assert "is the server up?" in capsys.readouterr().err
