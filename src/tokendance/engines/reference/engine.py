"""A small engine: any rows of any requests through the model's layers over a paged cache.

It serves tests and measurements: an oracle for the collective pass that runs in seconds, on CPU or
CUDA, without vLLM. It is no server: there is no scheduler and no prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tokendance.engines.reference.model import Model
from tokendance.engines.reference.paged import PagedKV
from tokendance.plan.reuse_plan import PageTable
from tokendance.reuse.base import PassHooks, RowBatch, VirtualSequence
from tokendance.reuse.rows import slots_of
from tokendance.types import RequestId, Rows

NO_HOOKS = PassHooks(before_attention=lambda layer: None)


@dataclass
class Stream:
    """One request: its tokens, its pages, and how many of its rows are in the cache."""

    token_ids: list[int]
    blocks: tuple[int, ...]
    filled: int = 0
    last_logits: torch.Tensor | None = field(default=None, repr=False)

    def table(self, request_id: RequestId) -> PageTable:
        return PageTable(request_id, self.blocks)


class _Reader(NamedTuple):
    """Query rows [start, end) of a batch that attend to the same pages."""

    start: int
    end: int
    keys: int
    pages: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


class ReferenceEngine:
    """Implements reuse.base.LayerEngine, and prefill and greedy decode on top of it."""

    def __init__(self, model: Model, *, num_pages: int = 1024, page_size: int = 16) -> None:
        self.model = model
        self.device = model.device
        self.rotary = model.rotary
        self.kv = PagedKV(
            len(model.layers),
            num_pages,
            page_size,
            model.kv_heads,
            model.head_dim,
            dtype=model.dtype,
            device=model.device,
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> ReferenceEngine:
        """An engine over a local Hugging Face checkpoint; options are those of the constructor."""
        return cls(Model.load(folder, dtype=dtype, device=device), **options)

    def forward(self, batch: RowBatch, hooks: PassHooks) -> None:
        """Compute and store K/V of the batch's rows (see reuse.base.LayerEngine)."""
        self.hidden(batch, hooks)

    def hidden(self, batch: RowBatch, hooks: PassHooks = NO_HOOKS) -> torch.Tensor:
        """As forward; returns [rows, hidden] of the rows still in the batch at the end."""
        model = self.model
        x = model.embedding[batch.token_ids]
        angles, readers = model.angles(batch.positions), self._readers(batch)
        for index, layer in enumerate(model.layers):
            q, k, v = model.project(layer, x, angles)
            if index == hooks.check_layer and hooks.on_check is not None:
                narrowed = hooks.on_check(k, v)
                if narrowed is not None:
                    batch, keep = narrowed
                    x, q, k, v = x[keep], q[keep], k[keep], v[keep]
                    angles, readers = model.angles(batch.positions), self._readers(batch)
            self.kv.write(index, batch.slots, k, v)
            hooks.before_attention(index)
            x = model.finish(layer, x, self._attend(index, q, readers))
        return x

    def _readers(self, batch: RowBatch) -> list[_Reader]:
        """One reader per stretch of virtual sequences over the same pages."""
        readers: list[_Reader] = []
        row, index = 0, 0
        sequences = batch.sequences
        while index < len(sequences):
            first, start = sequences[index], row
            runs = 0
            while index < len(sequences) and sequences[index].blocks == first.blocks:
                row += sequences[index].end - sequences[index].start
                index, runs = index + 1, runs + 1
            keys = max(s.end for s in sequences[index - runs : index])
            pages = first.blocks[: -(-keys // self.kv.page_size)]
            causal = runs == 1 and first.start == 0
            mask = None
            if not causal and row - start > 1:
                columns = torch.arange(keys, device=self.device)
                mask = batch.positions[start:row, None] >= columns
            table = torch.tensor(pages, dtype=torch.int64, device=self.device)
            readers.append(_Reader(start, row, keys, table, mask, causal))
        return readers

    def _attend(self, layer: int, q: torch.Tensor, readers: list[_Reader]) -> torch.Tensor:
        """q [rows, heads, head_dim] -> [rows, heads, head_dim]."""
        out = torch.empty_like(q)
        for reader in readers:
            k, v = self.kv.gather(layer, reader.pages)
            out[reader.start : reader.end] = F.scaled_dot_product_attention(
                q[reader.start : reader.end].transpose(0, 1)[None],
                k[: reader.keys].transpose(0, 1)[None],
                v[: reader.keys].transpose(0, 1)[None],
                attn_mask=reader.mask,
                is_causal=reader.causal,
                enable_gqa=self.model.heads != self.model.kv_heads,
            )[0].transpose(0, 1)
        return out

    def batch(self, work: Sequence[tuple[Stream, Sequence[Rows]]]) -> RowBatch:
        """The rows to compute of each stream, every run as one virtual sequence."""
        ids: list[int] = []
        positions, slots = [], []
        sequences: list[VirtualSequence] = []
        for stream, runs in work:
            table = stream.table(RequestId(""))
            for run in runs:
                ids.extend(stream.token_ids[run.start : run.end])
                positions.append(np.arange(run.start, run.end, dtype=np.int64))
                slots.append(slots_of(table, run, self.kv.page_size))
                sequences.append(VirtualSequence(run.start, run.end, stream.blocks))
        return RowBatch(
            torch.tensor(ids, dtype=torch.int64, device=self.device),
            torch.from_numpy(np.concatenate(positions)).to(self.device),
            torch.from_numpy(np.concatenate(slots)).to(self.device),
            tuple(sequences),
        )

    @contextmanager
    def streams(self, prompts: Sequence[Sequence[int]], room: int = 0) -> Iterator[list[Stream]]:
        """Streams with pages for each prompt and `room` more tokens; the pages are held inside.

        Raises OutOfPages if the cache cannot hold them all.
        """
        opened: list[Stream] = []
        try:
            for prompt in prompts:
                blocks = self.kv.allocate(len(prompt) + room)
                opened.append(Stream(list(prompt), blocks))
            yield opened
        finally:
            for stream in opened:
                self.kv.release(stream.blocks)

    def prefill(self, streams: Sequence[Stream]) -> torch.Tensor:
        """Compute every row that is not in the cache; logits float32 [streams, vocab] of the last.

        Each stream needs at least one such row.
        """
        runs = [(s, [Rows(s.filled, len(s.token_ids))]) for s in streams]
        if not all(run[0].start < run[0].end for _, run in runs):
            raise ValueError("every stream needs a row to compute")
        x = self.hidden(self.batch(runs))
        ends = torch.tensor([len(run[0]) for _, run in runs], device=self.device).cumsum(0)
        logits = self.model.logits(x[ends - 1])
        for stream, last in zip(streams, logits):
            stream.filled, stream.last_logits = len(stream.token_ids), last
        return logits

    def score(self, stream: Stream, tokens: Sequence[int]) -> torch.Tensor:
        """Append given tokens; float32 [tokens, vocab], the logits after each of them."""
        start = stream.filled
        stream.token_ids.extend(tokens)
        x = self.hidden(self.batch([(stream, [Rows(start, len(stream.token_ids))])]))
        logits = self.model.logits(x[-len(tokens) :])
        stream.filled, stream.last_logits = len(stream.token_ids), logits[-1]
        return logits

    def decode(
        self, streams: Sequence[Stream], max_tokens: int, stop: frozenset[int] = frozenset()
    ) -> list[list[int]]:
        """Greedy tokens of prefilled streams, all in one batch a step.

        A stream ends with a token of `stop` (included) or after max_tokens. Every token but the
        last is in the cache afterwards.
        """
        outputs: list[list[int]] = [[] for _ in streams]
        live = list(range(len(streams)))
        for _ in range(max_tokens):
            for index in live:
                logits = streams[index].last_logits
                if logits is None:
                    raise ValueError("decode needs prefilled streams")
                token = int(logits.argmax())
                outputs[index].append(token)
                streams[index].token_ids.append(token)
            live = [i for i in live if outputs[i][-1] not in stop]
            if not live or len(outputs[live[0]]) == max_tokens:
                break
            self.prefill([streams[i] for i in live])
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: frozenset[int] = frozenset()
    ) -> list[list[int]]:
        """Prefill and decode prompts in one batch."""
        with self.streams(prompts, room=max_tokens) as streams:
            self.prefill(streams)
            return self.decode(streams, max_tokens, stop)
