trl sft --model_name_or_path Qwen/Qwen2.5-7B --dataset_name mine --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \
  --max_length 2048 --bf16 --gradient_checkpointing --output_dir out --accelerate_config fsdp2
