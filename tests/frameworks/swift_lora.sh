NPROC_PER_NODE=8 swift sft \
    --model Qwen/Qwen2.5-7B \
    --dataset my/conversations \
    --lora_rank 16 \
    --max_length 4096 \
    --gradient_accumulation_steps 4 \
    --model_name my-model \
    --deepspeed zero2
