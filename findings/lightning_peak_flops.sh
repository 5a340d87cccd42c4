#!/usr/bin/env bash
# Lightning's ThroughputMonitor divides by a table of peaks that mixes dense and sparse figures. bfloat16 of an H100 SXM is
# 989e12, dense; of an H100 NVL 1,979e12, with sparsity. "L40S" matches the row of the L4, 121e12, which again is the sparse figure
# of that chip, a third of an L40S. H200, GH200 and B200 have none, since the table asks for "sxm1" in the name. So equal runs
# show twice or three times another MFU by the chip's name, and a run on an L40S can pass 100%.
# Guess before the run: dense figures for all, 835e12 for the H100 NVL and 362e12 for the L40S.
# Seen (Python 3.11, torch 2.13.0 CPU, lightning 2.6.6; names as nvidia-smi prints them, given in place of the driver's)
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1 lightning==2.6.6
cat > peaks.py <<'P'
from unittest import mock

import torch
from lightning.fabric.utilities.throughput import get_available_flops

CHIPS = ("A100-SXM4-80GB", "H100 80GB HBM3", "H100 PCIe", "H100 NVL", "H200", "B200", "L4", "L40S")
for chip in CHIPS:
    with mock.patch("torch.cuda.get_device_name", return_value=f"NVIDIA {chip}"):
        print(chip, get_available_flops(torch.device("cuda", 0), torch.bfloat16))
P
OMP_NUM_THREADS=1 env/bin/python peaks.py 2> log | tee seen
diff seen - <<'P'
A100-SXM4-80GB 312000000000000
H100 80GB HBM3 989400000000000
H100 PCIe 756000000000000
H100 NVL 1978800000000000
H200 None
B200 None
L4 121000000000000
L40S 121000000000000
P
