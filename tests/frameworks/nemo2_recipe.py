import nemo_run as run
from nemo.collections import llm


def configure_recipe(nodes: int = 1, gpus_per_node: int = 8):
    recipe = llm.llama3_8b.pretrain_recipe(
        dir="/checkpoints/llama3",
        name="llama3_8b_pretraining",
        num_nodes=nodes,
        num_gpus_per_node=gpus_per_node,
    )
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    recipe.trainer.strategy.context_parallel_size = 2
    recipe.data.global_batch_size = 256
    recipe.data.micro_batch_size = 1
    recipe.data.seq_length = 8192
    return recipe


def run_pretraining():
    recipe = configure_recipe()
    executor = run.LocalExecutor(ntasks_per_node=recipe.trainer.devices, launcher="torchrun")
    run.run(recipe, executor=executor, name="llama3_8b_pretraining")


if __name__ == "__main__":
    run_pretraining()
