deepspeed train_mem.py \
    --deepspeed scripts/zero3.json \
    --lora_enable True --lora_r 128 --lora_alpha 256 \
    --model_name_or_path checkpoints/lmsys/llama-2-7b-chat \
    --vision_tower openai/clip-vit-large-patch14-336 \
    --mm_vision_select_layer -2 --mm_use_im_start_end False \
    --bf16 True \
    --per_device_train_batch_size 16 \
    --model_max_length 2048 \
    --gradient_checkpointing True
