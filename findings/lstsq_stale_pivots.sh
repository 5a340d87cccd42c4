#!/usr/bin/env bash
# torch.linalg.lstsq with its default driver on a CPU (gelsy) solves a rank-deficient problem right or wrong by what memory held
# before: LAPACK reads the pivots as an input, and torch gives it an array that nobody filled. In a batch of three copies of one
# matrix whose first column is zero, the second and third copy get rank 0 and a solution of zeros, without an error. With the
# zero in the sixth column only 5 of 19 columns are used, and the residual is 21% above the least one. driver="gelsd" is right.
# The page calls gelsy the driver for a general matrix, and an unset pixel or a word that never occurs is a column of zeros.
# Known as pytorch/pytorch#187411, and as #71222 since 2022.
# Guess before the run: three equal solutions, the least squares, as NumPy's and as the page says of a general matrix.
# Seen (Python 3.11, torch 2.13.0 CPU): the zero's column; rank and residual over the least one, of copies 2 and 3; by gelsd
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > least.py <<'P'
import numpy as np
import torch

for zero in (0, 5, 19):
    generator = torch.Generator().manual_seed(0)
    inputs, target = (torch.randn(60, width, dtype=torch.float64, generator=generator) for width in (20, 1))
    inputs[:, zero] = 0
    solution = np.linalg.lstsq(inputs.numpy(), target.numpy(), rcond=None)[0]
    least = np.linalg.norm(inputs.numpy() @ solution - target.numpy())
    copies, targets = inputs.repeat(3, 1, 1), target.repeat(3, 1, 1)
    for driver in (None, "gelsd"):
        found = torch.linalg.lstsq(copies, targets, driver=driver)
        over = (copies @ found.solution - targets).norm(dim=(1, 2)) / least
        print(zero, driver, found.rank.tolist()[1:], [f"{value:.3f}" for value in over[1:]])
P
OMP_NUM_THREADS=1 env/bin/python least.py 2> log | tee seen
diff seen - <<'P'
0 None [0, 0] ['1.317', '1.317']
0 gelsd [19, 19] ['1.000', '1.000']
5 None [5, 5] ['1.205', '1.205']
5 gelsd [19, 19] ['1.000', '1.000']
19 None [19, 19] ['1.000', '1.000']
19 gelsd [19, 19] ['1.000', '1.000']
P
