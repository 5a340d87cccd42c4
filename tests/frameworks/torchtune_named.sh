tune run --nproc_per_node 8 lora_finetune_distributed --config llama3_1/8B_lora batch_size=2 gradient_accumulation_steps=4 \
  tokenizer.max_seq_len=2048 model.lora_rank=16 enable_activation_checkpointing=True
