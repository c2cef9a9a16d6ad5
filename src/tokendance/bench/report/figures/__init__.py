"""The report's sections, one function per figure: result files in, a Figure out."""

from __future__ import annotations

from tokendance.bench.report.figures import (
    backends,
    capacity,
    collective,
    costs,
    demos,
    quality,
    store,
)
from tokendance.bench.report.model import Spec

SPECS = (
    Spec("Figure 2: latency by request", "capacity.json", "capacity", capacity.latency_by_index),
    Spec("Figure 3: how alike a round is", "similarity.json", "similarity", quality.similarity),
    Spec("Figure 10: agents in a pool of fixed size", "capacity.json", "capacity", capacity.agents),
    Spec("Figure 11: a round at once", "collective.json", "collective", collective.collective),
    Spec("Figure 12: bytes of a family", "storage.json", "storage", store.storage),
    Spec("Figure 13: restore", "restore.json", "restore --repeat 11 --sweep", store.restore),
    Spec("Figure 14: the same answers", "fidelity.json", "fidelity", quality.fidelity),
    Spec("Recovery backends", "backends.json", "backends", backends.backends),
    Spec("Memory pressure: restore or recompute", "pressure.json", "pressure", costs.pressure),
    Spec("Prefill of a round", "prefill.json", "prefill", costs.prefill),
    Spec("Requests that share nothing", "overhead.json", "overhead", costs.overhead),
    Spec("Traces, side by side", "demo_*.json", "", demos.demos),
    Spec("Ten thousand rounds in a small store", "churn.json", "churn", store.churn),
)
