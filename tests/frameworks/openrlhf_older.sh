read -r -d '' commands <<EOF
../train_sft.py \
    --pretrain mistralai/Mixtral-8x7B-v0.1 \
    --max_len 2048 \
    --train_batch_size 128 \
    --micro_train_batch_size 4 \
    --zero_stage 3 \
    --bf16 \
    --gradient_checkpointing \
    --lora_rank 64
EOF
deepspeed $commands
