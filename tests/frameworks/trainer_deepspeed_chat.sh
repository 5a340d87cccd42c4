deepspeed main.py --model_name_or_path facebook/opt-1.3b --per_device_train_batch_size 8 --max_seq_len 512 --lora_dim 128 \
  --lora_module_name decoder.layers. --zero_stage 2 --offload --deepspeed --gradient_checkpointing --dtype bf16
