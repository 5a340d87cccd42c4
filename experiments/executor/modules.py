"""Modules of the experiment: a residual network, one of two inputs, and a Llama that computes in the type of its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from parsim.model.catalogue.networks import BasicBlock

CLASSES = 5


class Residual(nn.Module):
    """Three residual blocks with BatchNorm, one of them with a stride and a shortcut of its own, on images [1, 8, 8]."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width, 1)
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).mean(dim=(2, 3)))
        return out


class Reader(nn.Module):
    """Tokens through an LSTM, a series of numbers through encoder layers, and both together to a class.

    Two inputs that meet late, so that the components are no chain; a kernel that is never cut (LSTM) beside some that are.
    """

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.enter = nn.Linear(3, width)
        self.encoder = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.meet = nn.Linear(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, tokens: Tensor, series: Tensor) -> Tensor:
        read = self.recurrent(self.table(tokens))[0][:, -1]
        seen = self.encoder(self.enter(series)).mean(dim=1)
        out: Tensor = self.head(torch.tanh(self.meet(torch.cat([read, seen], dim=1))))
        return out


class Llama(nn.Module):
    """Hugging Face's Llama of `llama.json`, with torch's own RMSNorm.

    That of transformers normalises in float32, whatever the type of the weights. Sums of shards differ in the last digit of
    float64, which then moves a float32 by 6e-8 of itself now and then: a check to 1e-10 would be of that.
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig.from_json_file(Path(__file__).parent / "llama.json")
        config._attn_implementation, config.use_cache = "sdpa", False
        self.net = LlamaForCausalLM(config)
        for module in list(self.net.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(module, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.net(input_ids=tokens).logits
        return out
