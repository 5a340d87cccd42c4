"""My own training loop: what a step should take, and what it takes (docs/integrations.md: Lightning, Hugging Face)."""

import torch
from torch import nn

import parsim as ps


def main() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, 256)
    # On your own machine: cluster="this-machine". Here a profile of V100s stands for any cluster; the loop runs on a CPU.
    predicted = {"global_batch": 64, "devices": 1, "optimizer": "sgd", "settings": {"model.loss": "mse"}}
    with ps.watch(model, "dgx1-v100-32gb", example_inputs=batch, every=10, **predicted) as watch:
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch).squeeze(-1), batch[:, 0], reduction="sum").backward()
            optimizer.step()
            watch.step()
    print(watch)


if __name__ == "__main__":
    main()
