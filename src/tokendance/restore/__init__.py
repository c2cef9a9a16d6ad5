"""Fused restore (M17-M19): stored rows go back into pages in one pass over memory."""

from tokendance.restore.jobs import Placement
from tokendance.restore.pipeline import Report, Restorer
from tokendance.restore.target import PagedPlanes

__all__ = ["PagedPlanes", "Placement", "Report", "Restorer"]
