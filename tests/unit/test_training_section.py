"""[training] of a run file: what it takes, and what each wrong key says."""

from __future__ import annotations

from parsim.app.config import Question, parse_config
from parsim.app.launch import samples_not_taken

FILE = """\
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
[training]
global_batch = 16
"""


def config_of(more: str) -> Question:
    return parse_config(FILE + more)


def test_torchs_names_mean_the_rows_of_the_table() -> None:
    for torchs, row in (("AdamW", "adamw"), ("SGD", "sgd"), ("RMSprop", "rmsprop")):
        assert config_of(f'optimizer = "{torchs}"').training.optimizer == row
    assert config_of('optimizer = "RMSprop"\noptimizer_args = { momentum = 0.9 }').training.optimizer == "rmsprop_momentum"
    with_momentum = config_of('optimizer = "SGD"\noptimizer_args = { momentum = 0.8, nesterov = true }')
    assert with_momentum.training.optimizer == "sgd_momentum"
    assert dict(with_momentum.training.recipe.group_settings) == {"momentum": 0.8, "nesterov": True}


def test_a_schedule_is_written_and_read_again() -> None:
    text = """weight_decay = 0.1
no_weight_decay = ["norm", "*.pos_embedding"]
[training.schedule]
name = "MultiStepLR"
milestones = [30, 60]
gamma = 0.2
per = "epoch"
warmup = 5
"""
    config = config_of(text)
    schedule = config.training.recipe.schedule
    assert schedule is not None
    assert (schedule.name, schedule.warmup, schedule.per) == ("MultiStepLR", 5, "epoch")
    assert dict(schedule.arguments) == {"gamma": 0.2, "milestones": (30, 60)}
    assert parse_config(config.to_toml()) == config


GROUPS = """optimizer = "Adam"
optimizer_args = { betas = [0.5, 0.9] }
learning_rate = 2e-4
weight_decay = 0.1
[training.groups.critic]
parameters = ["discriminator.*"]
learning_rate = 1e-3
[training.groups.head]
parameters = ["head.*", "last.*"]
optimizer = "SGD"
optimizer_args = { momentum = 0.8 }
weight_decay = 0.0
"""


def test_a_group_takes_over_what_it_leaves_out() -> None:
    """Beside another optimizer rate and arguments are its own; the weight decay is that of all."""
    config = config_of(GROUPS)
    critic, head = config.training.recipe.update_groups
    assert (critic.optimizer, critic.learning_rate, critic.weight_decay) == ("adam", 1e-3, 0.1)
    assert dict(critic.optimizer_args) == {"betas": (0.5, 0.9)}
    assert (head.optimizer, head.learning_rate, head.weight_decay) == ("sgd_momentum", 0.05, 0.0)
    assert dict(head.optimizer_args) == {"momentum": 0.8}
    assert config.training.optimizers == ("adam", "sgd_momentum")
    assert parse_config(config.to_toml()) == config


def test_samples_of_a_whole_training_are_not_those_of_a_run() -> None:
    told = samples_not_taken(config_of("samples = 160"), 180)
    assert told.startswith("training.samples = 160 is for the time and price")
    assert "180 steps of 16 samples" in told
    assert samples_not_taken(config_of("samples = 160\nsteps = 20"), 20) == samples_not_taken(config_of(""), 180) == ""
