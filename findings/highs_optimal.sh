#!/usr/bin/env bash
# cvxpy reports status "optimal" for mixed-integer problems that HiGHS solved to a relative gap of 1e-4, its default. Of
# 12 knapsacks of 60 items, 2 answers are below the exact optimum of a dynamic programme, and all say "optimal". With
# mip_rel_gap=0 all are exact. A planner that calls such an answer certified has to set the gap.
# Seen (Python 3.11, cvxpy 1.9.3, highspy 1.15.1): short by [0, 0, 0, 0, 4, 0, 0, 8, 0, 0, 0, 0], status optimal
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q cvxpy==1.9.3 highspy==1.15.1 numpy==2.4.1
cat > knapsack.py <<'P'
import cvxpy as cp
import numpy as np


def exact(weights, values, room):
    best = np.zeros(room + 1, dtype=np.int64)
    for weight, value in zip(weights, values):
        best[weight:] = np.maximum(best[weight:], best[:-weight] + value)
    return int(best[room])


usual, tight, states = [], [], set()
for seed in range(12):
    rng = np.random.default_rng(seed)
    weights = rng.integers(20, 100, 60)
    values = weights * 100 + rng.integers(0, 30, 60)
    room = int(weights.sum() // 2)
    taken = cp.Variable(60, boolean=True)
    problem = cp.Problem(cp.Maximize(values @ taken), [weights @ taken <= room])
    problem.solve(solver=cp.HIGHS)
    states.add(problem.status)
    usual.append(exact(weights, values, room) - round(problem.value))
    problem.solve(solver=cp.HIGHS, mip_rel_gap=0.0)
    tight.append(exact(weights, values, room) - round(problem.value))
print(states, sum(short > 0 for short in usual), sum(short > 0 for short in tight))
P
env/bin/python knapsack.py | tee seen
diff seen - <<'P'
{'optimal'} 2 0
P
