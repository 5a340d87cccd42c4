python unsloth-cli.py --model_name unsloth/llama-3-8b --max_seq_length 4096 --load_in_4bit --r 64 --lora_alpha 32 \
  --use_gradient_checkpointing unsloth --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --optim adamw_8bit
