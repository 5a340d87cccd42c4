deepspeed pretrain_gpt.py \
  --deepspeed --deepspeed_config ds_config_gpt.json --zero-stage 1 --no-pipeline-parallel \
  --tensor-model-parallel-size 1 --moe-expert-parallel-size 8 \
  --num-experts 64 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --create-moe-param-group \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size 8 --global-batch-size 256 --bf16 \
  --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
