"""A language model from a Hugging Face config.json: does it fit on eight A100s, and how is it divided?"""

import json
import tempfile
from pathlib import Path

import parsim as ps

# The config of a small Llama, as `config.json` has it; a downloaded one is used in the same way. No weights are needed.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        answer = ps.plan(
            path, cluster="8xa100-sxm-40gb", global_batch=64, precision="amp_bf16", optimizer="adamw", input_shape=(2048,)
        )
    print(answer)
    best = answer.chosen
    print(f"\n{best.throughput_samples_per_s.median * 2048:,.0f} tokens/s; fits with probability {best.fit_probability:.2f}")


if __name__ == "__main__":
    main()
