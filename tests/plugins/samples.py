"""What runs in these tests are trained on."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

__all__ = ["Numbers"]


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noise is drawn while reading: in this process or in a worker, wherever the sample is read."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]
