"""Host memory: the tier that entries live in. Pinned where CUDA is, and counted to the byte."""

from __future__ import annotations

import torch


class HostMemory:
    """Allocates and accounts the tensors of entries; `held` is the sum of what is allocated.

    budget: bytes that `held` may reach; the owner asks `fits` before it allocates.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"the byte budget must not be negative, it is {budget}")
        self.budget = budget
        self.held = 0
        self._pinned = torch.cuda.is_available()

    def fits(self, nbytes: int) -> bool:
        return self.held + nbytes <= self.budget

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of undefined content whose bytes are accounted."""
        tensor = torch.empty(shape, dtype=dtype, pin_memory=self._pinned)
        self.held += tensor.nbytes
        return tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """An accounted host copy."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def free(self, tensor: torch.Tensor) -> None:
        """Give the tensor's bytes back; the caller drops its reference."""
        self.held -= tensor.nbytes
