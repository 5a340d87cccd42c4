SIZE=13B
TP=2
if [ -z ${VP} ]; then vp=""; else vp="--num-layers-per-virtual-pipeline-stage ${VP}"; fi
if [[ $SIZE == 7B ]]; then
  LAYERS=32; HIDDEN=4096
elif [ "$SIZE" = 13B ] ; then
  LAYERS=40
  HIDDEN=5120
else
  echo "unknown size"; exit 1
fi
case $SIZE in
  7B|8B) HEADS=32 ;;
  *)
    HEADS=40 ;;
esac
if [ $TP -gt 1 ] && [ $SIZE != 70B ]; then sp="--sequence-parallel"; fi
torchrun pretrain.py --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --vocab-size 32000 \
  --seq-length 2048 --tensor-model-parallel-size $TP $sp $vp --bf16
