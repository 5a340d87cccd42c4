#!/usr/bin/env bash
# clip_grad_norm_ sets every gradient to 0 where the norm overflows although all gradients are finite: squares of fp32
# values above about 1.8e19 are infinite, the total norm is inf, and max_norm / inf is 0. The step then changes nothing, and
# nothing is raised (error_if_nonfinite is false). At 1e18 the same call clips as it should.
# Seen (Python 3.11, torch 2.13.0 CPU): norm and gradients of two arrays, one of size 1
#   1e+18 finite [0.5, 5e-19]   1e+20 inf [0.0, 0.0]
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > clip.py <<'P'
import torch

for size in (1e18, 1e20):
    large, small = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    large.grad, small.grad = torch.full((4,), size), torch.ones(4)
    norm = torch.nn.utils.clip_grad_norm_([large, small], 1.0)
    print(size, bool(norm.isfinite()), [round(float(p.grad[0] / 1e-19)) * 1e-19 > 0 for p in (large, small)])
P
env/bin/python clip.py | tee seen
diff seen - <<'P'
1e+18 True [True, True]
1e+20 False [False, False]
P
