# Options that another script sources: nothing starts here.
MODEL_ARGS=(
   --swiglu
   --num-layers 28
   --hidden-size 1024
   --ffn-hidden-size 3072
   --num-attention-heads 16
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization RMSNorm
   --group-query-attention
   --num-query-groups 8
   --vocab-size 151936
   --kv-channels 128
   --qk-layernorm
   --seq-length 4096
)
