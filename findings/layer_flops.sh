#!/usr/bin/env bash
# Four counters of one nn.TransformerEncoderLayer (width 256, 128 tokens, CPU) say 0.92, 0.62, 0.50 and 0.005 of its
# multiplications, and torch's own 0 once the layer is in eval mode without gradients: it then runs as one fused operator that the
# counter has no formula for. None warns. thop counts the feed-forward part alone, torchinfo the norms, and torch leaves out the
# products of attention on the CPU (7.7%).
# Guess before the run: all equal, but for a factor of 2 between flop and multiplications.
# Seen (Python 3.11, torch 2.13.0 CPU, thop 0.1.1, ptflops 0.7.5, torchinfo 1.8.0): shares of the count by hand
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
env/bin/pip install -q --no-deps thop==0.1.1.post2209072238 ptflops==0.7.5 torchinfo==1.8.0
cat > count.py <<'P'
import thop
import torch
import torchinfo
from ptflops import get_model_complexity_info
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

WIDTH, TOKENS, BATCH = 256, 128, 2
layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
values = torch.randn(BATCH, TOKENS, WIDTH)
by_hand = BATCH * TOKENS * (4 + 8) * WIDTH**2 + 2 * BATCH * TOKENS**2 * WIDTH


def of_torch():
    with FlopCounterMode(display=False) as counter:
        layer(values)
    return counter.get_total_flops() / 2


found = {"torch": of_torch()}
layer.eval()
with torch.no_grad():
    found["torch, eval and no_grad"] = of_torch()
layer.train()
found["ptflops"] = get_model_complexity_info(
    layer, (TOKENS, WIDTH), as_strings=False, print_per_layer_stat=False, backend="pytorch", input_constructor=lambda shape: values
)[0]
found["torchinfo"] = torchinfo.summary(layer, input_data=values, verbose=0, mode="train").total_mult_adds
found["thop"] = thop.profile(layer, (values,), verbose=False)[0]
for name, count in found.items():
    print(f"{name}: {count / by_hand:.3f}")
P
OMP_NUM_THREADS=1 env/bin/python count.py 2> log | tee seen
diff seen - <<'P'
torch: 0.923
torch, eval and no_grad: 0.000
ptflops: 0.502
torchinfo: 0.005
thop: 0.618
P
