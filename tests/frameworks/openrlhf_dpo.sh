deepspeed --module openrlhf.cli.train_dpo --pretrain meta-llama/Meta-Llama-3-8B --train_batch_size 128 --micro_train_batch_size 1 --zero_stage 3
