"""My own module with several inputs: which plan, and where do time and memory go?"""

import torch
from torch import Tensor, nn

import parsim as ps


class Recommender(nn.Module):
    """Two towers and a rating. The forward names its inputs; parsim's inputs take the same names."""

    def __init__(self, users: int = 200_000, items: int = 50_000, width: int = 256) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.towers = nn.Sequential(nn.Linear(2 * width + 16, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        self.rating = nn.Linear(1024, 1)

    def forward(self, user: Tensor, item: Tensor, context: Tensor) -> Tensor:
        both = torch.cat([self.users(user), self.items(item), context], dim=-1)
        return self.rating(self.towers(both)).squeeze(-1)


def main() -> None:
    batch = 4
    example = {
        "user": torch.zeros(batch, dtype=torch.long),
        "item": torch.zeros(batch, dtype=torch.long),
        "context": torch.randn(batch, 16),
    }
    answer = ps.plan(
        Recommender(),
        cluster="dgx1-v100-16gb",
        global_batch=65536,
        optimizer="adam",
        example_inputs=example,
        settings={"model.loss": "mse"},
    )
    print(answer)

    print("\nMilliseconds of rank 0, by what it does:")
    print((1e3 * answer.chosen.breakdown().set_index("rank").loc[0]).round(2).to_string())

    print("\nMiB of rank 0, by what they hold:")
    memory = answer.chosen.memory().query("rank == 0").set_index("line")["size_bytes"] / 2**20
    print(memory[memory > 0].round(1).to_string())


if __name__ == "__main__":
    main()
