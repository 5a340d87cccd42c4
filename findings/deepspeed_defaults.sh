#!/usr/bin/env bash
# DeepSpeed 0.19.3 clips gradients at a norm of 1.0 where the config does not say gradient_clipping; 0.19.2 does not clip.
# So one config file trains differently after a patch release. overlap_comm, left out, is true at ZeRO stage 3 alone.
# Seen (Python 3.11, torch 2.13.0 CPU):
#   0.19.2 [(0, 0.0, False), (1, 0.0, False), (2, 0.0, False), (3, 0.0, True)]   (stage, gradient_clipping, overlap_comm)
#   0.19.3 [(0, 1.0, False), (1, 1.0, False), (2, 1.0, False), (3, 1.0, True)]
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1 setuptools==80.9.0 wheel==0.45.1 hjson==3.1.0 ninja==1.13.0 psutil==7.2.1 py-cpuinfo==9.0.0 \
  pydantic==2.12.5 tqdm==4.67.1 msgpack==1.1.2 einops==0.8.1 packaging==25.0
cat > defaults.py <<'P'
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig

configs = [DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": stage}}) for stage in range(4)]
print(deepspeed.__version__, [(n, c.gradient_clipping, c.zero_config.overlap_comm) for n, c in enumerate(configs)])
P
for version in 0.19.2 0.19.3; do
  DS_BUILD_OPS=0 env/bin/pip install -q --no-build-isolation --no-deps "deepspeed==$version"
  DS_ACCELERATOR=cpu env/bin/python defaults.py 2> log | grep "^$version" | tee -a seen
done
diff seen - <<'P'
0.19.2 [(0, 0.0, False), (1, 0.0, False), (2, 0.0, False), (3, 0.0, True)]
0.19.3 [(0, 1.0, False), (1, 1.0, False), (2, 1.0, False), (3, 1.0, True)]
P
