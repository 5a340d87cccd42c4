accelerate launch trl/scripts/sft.py \
    --model_name_or_path meta-llama/Llama-3.2-3B \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_length 1024 --bf16 \
    --use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj k_proj v_proj o_proj --output_dir out 2>&1 | tee log
