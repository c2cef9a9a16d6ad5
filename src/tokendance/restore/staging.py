"""Two buffers in ping-pong (M17): one layer is placed while the next one is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from tokendance.restore.jobs import Feed
from tokendance.store.blocks import Packed


class Stager:
    """Brings one layer of every feed to a device.

    Unpacked rows that are on the device already are handed out where they lie. Everything else goes
    through two sets of buffers; on CUDA the copies run on a stream of their own, from the store's
    pinned memory, and events keep the two streams apart. `loaded` counts bytes read from the store.
    """

    def __init__(self, feeds: Sequence[Feed], device: torch.device) -> None:
        self.loaded = 0
        self._feeds = feeds
        self._device = device
        self._layers = len(feeds[0].plane.layers) if feeds else 0
        self._buffers: list[list[torch.Tensor | None]] = [[None] * len(feeds) for _ in range(2)]
        self._planes: list[list[torch.Tensor]] = [[], []]
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._ready = [torch.cuda.Event() for _ in range(2)] if self._cuda else []
        self._free = [torch.cuda.Event() for _ in range(2)] if self._cuda else []

    def __enter__(self) -> Stager:
        if self._layers:
            self._start(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def take(self, layer: int) -> list[torch.Tensor]:
        """The rows of every feed in this layer; starts loading the next one."""
        if layer + 1 < self._layers:
            self._start(layer + 1)
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(self._ready[layer % 2])
        return self._planes[layer % 2]

    def placed(self, layer: int) -> None:
        """Everything that reads this layer's rows has been launched."""
        if self._cuda:
            self._free[layer % 2].record(torch.cuda.current_stream(self._device))

    def _start(self, layer: int) -> None:
        if not self._cuda:
            self._load(layer)
            return
        with torch.cuda.stream(self._stream):
            if layer >= 2:
                torch.cuda.current_stream(self._device).wait_event(self._free[layer % 2])
            self._load(layer)
            self._ready[layer % 2].record(torch.cuda.current_stream(self._device))

    def _load(self, layer: int) -> None:
        self._planes[layer % 2] = [
            self._fetch(layer % 2, number, feed, layer) for number, feed in enumerate(self._feeds)
        ]

    def _fetch(self, side: int, number: int, feed: Feed, layer: int) -> torch.Tensor:
        packed = feed.plane.layer(layer)
        scales = None if packed.scales is None else packed.scales[feed.start : feed.end]
        rows = Packed(packed.values[feed.start : feed.end], scales)
        self.loaded += rows.nbytes
        if scales is None and rows.values.device == self._device:
            return rows.values
        buffer = self._buffers[side][number]
        if buffer is None:
            buffer = torch.empty(rows.values.shape, dtype=feed.plane.dtype, device=self._device)
            self._buffers[side][number] = buffer
        if scales is not None:
            values = rows.values.to(self._device, non_blocking=True)
            rows = Packed(values, scales.to(self._device, non_blocking=True))
        return rows.unpack(feed.plane.dtype, buffer)
