#!/bin/bash
# Options of alpaca-lora's finetune.py: a batch over all ranks, and one of each pass.
WORLD_SIZE=2 CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 --master_port=1234 finetune.py \
    --base_model 'huggyllama/llama-7b' \
    --data_path './instructions.json' \
    --output_dir='./lora' \
    --batch_size=128 \
    --micro_batch_size 4 \
    --cutoff_len 512 \
    --lora_target_modules='[q_proj,k_proj,v_proj,o_proj]' \
    --lora_r=16 \
    --group_by_length
