"""Models of the experiment that are not in the zoo: one effect each that a user brings along."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 10


class Recurrent(nn.Module):
    """An embedding, recurrent layers, and a class from the last step."""

    def __init__(self, hidden: int = 128, layers: int = 2, vocabulary: int = 500) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, hidden)
        self.core = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.core(self.table(tokens))[0][:, -1])
        return made


class Conditioned(nn.Module):
    """A denoising network: an image and the time that it was given noise for."""

    def __init__(self, width: int = 32, steps: int = 100) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(steps, width), nn.Linear(width, width), nn.SiLU())
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        wide = torch.relu(self.enter(image) + self.time(step)[:, :, None, None])
        deep = torch.relu(self.middle(torch.relu(self.down(wide))))
        made: Tensor = self.leave(torch.cat([self.up(deep), wide], dim=1))
        return made
