#!/usr/bin/env bash
# torchtitan cuts 32 layers on 4 pipeline stages into 8, 9, 8 and 7: the embedding and the head count as a layer each, and what
# does not divide goes to the first stages. Megatron-Core cuts the same model into 8, 8, 8 and 8. So the same degrees are other
# stages, and the second stage of torchtitan is the slowest. Reading a TOML file needs triton, which no CPU build of torch brings.
# Guess before the run: 8, 8, 8, 8, and a config is read wherever torch runs.
# Seen (Python 3.11, torch 2.13.0 CPU, torchtitan 0.2.2):
#   4 stages [8, 9, 8, 7]   8 stages [4, 5, 4, 4, 4, 4, 4, 3]   config: No module named 'triton'
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
env/bin/pip install -q --no-deps torchtitan==0.2.2 tyro==0.9.35 docstring-parser==0.17.0 shtab==1.8.0 typeguard==4.4.4 \
  rich==14.2.0 typing-extensions==4.15.0 markdown-it-py==4.0.0 mdurl==0.1.2 pygments==2.19.2 tokenizers==0.22.1
cat > cut.py <<'P'
import ast
import importlib.util
from pathlib import Path

folder = importlib.util.find_spec("torchtitan").submodule_search_locations[0]
tree = ast.parse(Path(folder, "distributed", "pipeline_parallel.py").read_text())
name, space = "generate_llm_fqn_per_model_part", {}
exec(ast.unparse(next(node for node in tree.body if getattr(node, "name", "") == name)), space)  # alone: the file needs triton
for stages in (4, 8):
    parts = space[name](stages, 32)
    print(stages, [sum(entry.startswith("layers.") for entry in part) for part in parts])
try:
    from torchtitan.config import ConfigManager

    print(ConfigManager().parse_args([]).parallelism.pipeline_parallel_degree)
except ModuleNotFoundError as error:
    print(error)
P
env/bin/python cut.py 2> log | tee seen
diff seen - <<'P'
4 [8, 9, 8, 7]
8 [4, 5, 4, 4, 4, 4, 4, 3]
No module named 'triton'
P
