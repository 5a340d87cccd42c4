# As releases before 3 wrote it: a model by its type, and short names of the batch and of the type.
NPROC_PER_NODE=2 \
CUDA_VISIBLE_DEVICES=0,1 \
python llm_sft.py \
    --model_type qwen2-7b-instruct \
    --model_id_or_path /models/Qwen2-7B-mine \
    --sft_type lora \
    --dtype bf16 \
    --max_length 2048 \
    --lora_rank 8 \
    --lora_target_modules ALL \
    --batch_size 2 \
    --gradient_accumulation_steps $(expr 16 / 2) \
    --deepspeed 'default-zero2'
