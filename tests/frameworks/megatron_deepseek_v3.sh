#!/usr/bin/env bash
set -euo pipefail
NNODES=${NNODES:-128}
options=" \
  --distributed-timeout-minutes 60 \
  --tensor-model-parallel-size ${TP:-1} \
  --pipeline-model-parallel-size ${PP:-16} \
  --expert-model-parallel-size ${EP:-64} \
  --context-parallel-size 1 \
  --expert-tensor-parallel-size 1 \
  --num-virtual-stages-per-pipeline-rank 2 \
  --use-distributed-optimizer \
  --overlap-grad-reduce --overlap-param-gather \
  --use-mcore-models --sequence-parallel --use-flash-attn \
  --disable-bias-linear \
  --micro-batch-size 1 --global-batch-size ${GBS:-8192} \
  --train-samples 585937500 \
  --transformer-impl transformer_engine \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3 \
  --make-vocab-size-divisible-by 3232 \
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 \
  --seq-length 4096 --max-position-embeddings 4096 \
  --position-embedding-type rope --rotary-base 10000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu \
  --untie-embeddings-and-output-weights \
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
  --qk-layernorm --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 \
  --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 \
  --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-token-dispatcher-type flex --moe-enable-deepep \
  --moe-router-pre-softmax --moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 \
  --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias \
  --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion \
  --recompute-granularity selective --recompute-modules mla_up_proj mlp moe \
  --pipeline-model-parallel-layout Et*3|(tt|)*29m|L \
  --bf16 --fp8-recipe blockwise --fp8-format e4m3 \
"
run_cmd="cd ${MEGATRON_PATH}; python -u pretrain_gpt.py ${options}"
srun -N $NNODES --ntasks-per-node=8 bash -c "${run_cmd}"
