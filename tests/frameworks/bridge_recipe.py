from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

config = llama3_8b_pretrain_config(
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    global_batch_size=512,
    micro_batch_size=2,
    seq_length=8192,
)
config.train.train_iters = 1000
config.model.sequence_parallel = True
pretrain(config, forward_step)
