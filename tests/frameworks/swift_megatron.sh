NPROC_PER_NODE=8 \
megatron sft \
    --model Qwen/Qwen3-30B-A3B \
    --dataset my/conversations \
    --train_type lora \
    --lora_rank 16 \
    --target_modules all-linear \
    --expert_model_parallel_size 4 \
    --tensor_model_parallel_size 2 \
    --sequence_parallel true \
    --micro_batch_size 1 \
    --global_batch_size 128 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --max_length 4096
