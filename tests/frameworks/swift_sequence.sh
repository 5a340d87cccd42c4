NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --tuner_type full --dataset mine --torch_dtype bfloat16 --max_length 16384 \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --deepspeed zero3 --sequence_parallel_size 4
