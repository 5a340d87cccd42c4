from dataclasses import replace

from utils.utils import WorkloadBaseConfig

BASE_LLAMA3_70B_CONFIG = WorkloadBaseConfig(num_gpus=64, global_batch_size=128)

LLAMA3_70B_PRETRAIN_CONFIG_H100_FP8_CS = replace(
    BASE_LLAMA3_70B_CONFIG,
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=8,
    virtual_pipeline_model_parallel_size=5,
)
