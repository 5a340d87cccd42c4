"""README.md of this experiment, from results.json and worth.json.

    python experiments/published/readme.py [--write]

Without `--write` it fails if the README says something else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rules import FRAMEWORKS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.markdown import table

FOLDER = Path(__file__).parent

BEFORE = """Before this experiment, on part of the same rows: Megatron 19.7% (calculon 3.7%, set by its authors on
these rows), multi-node A100 14.7% (calculon 11.1% on 103 of them, vTrain 14.7%), FSDP 128%."""

RULES_TEXT = """\
One rule per framework (`rules.py`), for what a row leaves blank. The first version was written before any row was
predicted. These were decided after errors had been seen:

- the slowdown of early attention kernels, heads without tensor cores, sums of gradients, gradients of bf16 in fp32,
- FSDP's BACKWARD_POST, torchtitan's alternate recomputation, scatter-gather, chunks that cut evenly,
- Llama 3's depth and saving of activations, Megatron 2022's batch and split, BLOOM's heads, the recipes of NeMo's launcher,
- Composer's metrics and optimizer, and which of its tables stop recomputation early,
- the overlap of tensor parallelism, the retry with more recomputation where a plan would not fit,
- the sums that run beside gradients of weights, and that NeMo's recipes spare layers (by NVIDIA's sources),
- kernels of biases, passes of the loss, clipping, scaled losses in fp16, and when the fused softmax does not run (by
  Megatron's sources),
- how the authors of selective recomputation count its FLOP: their HFU and MFU of one run now agree (-1.3 and -1.4%),
- that factors come from rows on one node.

So was the precision of Sailor's rows, by their stated memory peaks. The column "held out" holds out factors, not rules.

For more names, spellings and boards, pages of the sources were opened on 2026-11-27, to see which configurations they
list. They also hold measured values. None was used, and nothing was fitted to them. From there comes which names are
wanted: GPT3-5B, GPT3-760M, Nemotron-22B, BERT 100B and Kimi K2 (their shapes are from the frameworks' own files). So
does the run by which it was seen that NeMo 24.07 keeps its master weights as remainders."""


def number(value: float | None, form: str = "{:.1f}") -> str:
    """A number of a table."""
    return "" if value is None else form.format(value)


def group_line(name: str, found: Mapping[str, Any]) -> list[str]:
    """One line of the table of groups."""
    return [
        name,
        str(found["rows"]),
        number(found["mean_error"]),
        number(found["bias"], "{:+.1f}"),
        number(found["one_factor"]),
        number(found["held_out"]),
        number(found["coverage"], "{:.0f}"),
        number(found["width"], "{:.0f}"),
        str(found["does_not_fit"]),
        number(found["spearman"], "{:.2f}"),
    ]


HEAD = (
    "rows",
    "n",
    "mean error %",
    "bias %",
    "with one factor of its own %",
    "held out %",
    "90% intervals hold %",
    "median width %",
    "does not fit",
    "Spearman",
)


def readme(document: Mapping[str, Any]) -> str:
    """The page. Errors are of the seconds of a step, predicted over measured."""
    parts = [
        "# Published training runs of large transformers",
        "",
        f"By factors fitted on other sources, {document['judged']} published training runs are predicted with a mean "
        f"error of {document['all']['held_out']:.1f}%, and their 90% intervals hold for {document['all']['coverage']:.0f}%. "
        f"For rows that needed no assumption, the mean error is {document['complete']['held_out']:.1f}%.",
        "",
        "How close are parsim's predictions to published measurements? `run.py` makes this page and `results.json`; "
        "`predict.py` answers any file of the same format. Each prediction is a Model, a Plan and a Cluster made of parts, "
        "evaluated by parsim. Nothing is fitted to the rows, except the factors below, which the columns name.",
        "",
        f"Rows: {document['rows']}; {document['judged']} judged, {len(document['not_expressed'])} not expressed.",
        "",
        table(
            HEAD,
            [
                *(group_line(name, found) for name, found in document["groups"].items()),
                group_line("all", document["all"]),
                group_line("complete rows (nothing assumed of split, batch, recomputation)", document["complete"]),
            ],
            words=1,
        ),
        "",
        "Held out: with one factor per GPU and precision, fitted on all other sources. It is fitted on rows of one node where "
        "three sources have some, else on complete rows likewise, else on all. " + BEFORE,
        "",
        "## Factors",
        "",
        table(
            ("GPU and precision", "factor on seconds", "sources"),
            [[key, number(entry["factor"], "{:.3f}"), str(entry["sources"])] for key, entry in document["factors"].items()],
            words=1,
        ),
        "",
        "## Ablation",
        "",
        "Mean error (bias, mean error after one factor of these rows) in per cent without each part of the model and with it; "
        "`run.py --worth`.",
        "",
        _worth(),
        "",
        "## What is not explained",
        "",
        NOT_EXPLAINED,
        "",
        "## Tried, and not kept",
        "",
        TRIED,
        "",
        "## Worst rows",
        "",
        table(
            ("row", "error %", "held out %", "question"),
            [
                [entry["id"], number(entry["error"], "{:+.0f}"), number(entry["held_out"], "{:+.0f}"), entry["why"][:160]]
                for entry in document["worst"][:15]
            ],
        ),
        "",
        "## Rules for blanks",
        "",
        *RULES_TEXT.splitlines(),
        "",
        table(
            ("framework", "ids", "recompute", "ZeRO", "sequence parallel", "micro-batch", "seq", "attention"),
            _rules(),
        ),
        "",
        "**What would refute it**: complete rows of a source that is not in the table, by the factors above, whose mean error "
        "is above that of the groups here.",
        "",
    ]
    return "\n".join(parts)


NOT_EXPLAINED = """- 39B on 512 A100 with tp 2 and pp 16 takes 1.7 times as long as predicted (two rows). With tp 4, pp 16
  and microbatches of 12 it takes 1.3 times as long. Their neighbours do not: tp 4, pp 16 with microbatches of 2 is 4%
  off, tp 1 with pp 16 5%. See below.
- vTrain's rows with tp 2 and 4 are slower than those with tp 1 and 8 by 5 to 10%, also without a pipeline.
- 3.6B with tp 8 and microbatches of 2 takes 9.3 ms per layer and microbatch, predicted 6.3. Its host would take 0.7 ms.
- MT-NLG 530B reached 126 and 113 TFLOP/s per GPU where the same shape reached 163. Its two rows differ by 80
  microbatches: 196 ms each, and 6.3 s per step besides. Megatron-LM's 530B took 186 ms per microbatch. So what is missing
  is mostly the 6.3 s, of which sums of gradients explain 0.3 to 0.6.
- Megatron-LM's rows of 2021 on several nodes of A100 still take 4 to 10% longer than predicted, 1.7B to 1T, with and
  without a pipeline. FSDP's of 2023 and vTrain's 175B do not, and 22B on one node is 0 to 1% off. Kernels of biases,
  passes of the loss, clipping and loss scaling explain 0.4 to 4 points; before them it was 2 to 11%. The tables for
  fitting products are of 2023 to 2026: libraries that became faster in between would have this effect, but then on 22B
  too. vidur's table (torch of 2023) is 6% slower than a fit without it, TensorRT-LLM's of 2025 5% faster. No table of
  2021 was found.
- Clipping and loss scaling reduce the error of Megatron's rows without a factor. After one of the rows' own they
  increase it by 0.2 to 0.3 points, because two rows of 2020 are too slow (the next point, and 8B on 1,024 A100, 7%).
  They stay, because they take real time.
- GPT-2 1B on one V100 of 2020 is 8% too slow, and was 3% before these pieces. The three larger ones on 2 to 8 V100 were
  3 to 7% too fast and are -4 to +2% off.
- BLOOM's tuning is predicted 10 to 29% too fast. What is missing grows with the samples: 34 ms per sample and layer
  with tp 8, where 28.5 are predicted, and hardly any constant besides. At like shapes vTrain's 175B reaches 168 TFLOP/s
  (tp 8) and 196 (tp 4) in a full pipeline, BLOOM 154 and 175. GPUs held at 1,275 instead of 1,410 MHz would have this
  effect. No source says so.
- "sums beside weight gradients" looks bad without a factor, because all Megatron rows are too fast, and brings Selene's
  from 4.8 to 2.6% after one factor of these rows.
- "gathering ahead" and "early stop" on H100 look bad without a factor, because all rows of that GPU are too fast, and
  both shorten steps. After one factor of these rows early stop brings them nearer, 3.5 to 2.4%, and gathering ahead changes
  little, 3.4 to 3.6%. It stays, because the framework does it.
- GPT 175B by NeMo 23.07 on A100 takes 1.5 times as long as predicted. Full recomputation would explain it, but no source
  says so.
- DeepSeek, Qwen3 and gpt-oss on Blackwell lie between -64% and +31%. Dense rows in 8 bits lie between -15 and +17%. The
  others differ by the version of the container, with the same shape and split. Those of 26.06 and later are predicted
  12 to 31% too slow (DeepSeek, Qwen3), earlier ones 5 to 20% too fast. NVIDIA's recipes say what changed for DeepSeek
  and gpt-oss: CUDA graphs of a whole step, one kernel for all experts of a layer, hidden exchanges (Megatron-Bridge
  scripts/performance/configs/deepseek and gpt_oss, @042641823051, @07eea52d4523).
- The largest errors are of few samples per microbatch and many experts per GPU on x86 hosts. With 16 experts per GPU
  and one sample a layer takes 9 to 16 ms where 3 and 7 are predicted (Qwen3 30B and 235B). With 4 or 8 samples it takes
  what is predicted. Hosts that launch expert by expert would have this effect. One product of an expert costs 33 us to
  launch (8 experts of 128 rows in 0.27 ms, NVIDIA/TransformerEngine pull request 3134). Six of them make 3.2 ms of the
  9 to 16. No source was found for the rest.
- Sailor's rows on GH200 still take 1.3 to 2.3 times as long as predicted, the more the smaller the microbatch. About 2
  ms per layer and microbatch do not grow with it. A component here costs the larger of host and GPU time; their rows
  look like the sum.
- SimuMax's B200 rows are all slower than parsim says, by a common factor of 1.3, and H100 rows need about 1.1. Lower clocks
  in training than in the tables were the hypothesis, but the tables do not support it. See below. SimuMax, which looks up
  efficiencies measured on that machine, is 2 to 11% too fast itself.
- The 5% of SimuMax when held out are a coincidence. The only other row of a B200 in bf16 (gpt-oss, 53% too fast for
  reasons of its own) happens to give about the factor that they need.
- Context parallelism over long sequences is 30% too fast (torchtitan, 131,072 and 262,144 tokens; 32,768 without it
  7%). It is not the exchange of keys: attention takes 94 to 97% of these steps."""

TRIED = """- Slow links inside the nodes of BLOOM ("NVLink 4 inter-gpu connects" in its model card): tp 8 is 5 to 8% further off
  than tp 4. All-reduces would have to take 3 times as long to explain it, and no source says how the 8 GPUs are
  connected. ALiBi's addition to scores would be 0.7%.
- A network card at the rate of Omni-Path's or RoCE's own part instead of 96% of the nominal rate (BLOOM, InternEvo): 12.2
  and 12.1 instead of 12.0 GB/s. No measurement of collectives over Omni-Path was found.
- SwiGLU of InternEvo by separate kernels: its source compiles silu and product into one (`Silu`, torch.jit.script).
- One network card for all rings of a communicator (vTrain, tp 2 and 4). It would explain 0.2 to 0.5 s of 4 s
  of 3.6B. But it makes 175B with tp 4 1.3 s too slow, which is right today, and gives 39B with tp 2 0.3 s of the 10 that
  are missing.
- Transfers between stages, or a constant per step (39B with tp 2, pp 16). What is missing is 75.1 ms per sample and place
  of the pipeline with microbatches of 2, and 75.2 with 3. So it is no constant. As a transfer it would be 4 to 7 GB/s per
  node, where tp 1 and 8 have 100 on that machine. The same pipeline with tp 4 and microbatches of 2 is right. A slow link
  or GPU in these runs would have this effect.
- Blocking launches (BLOOM). Its training script sets CUDA_LAUNCH_BLOCKING=1 (tr11-176B-ml.slurm). The 52 launches that
  are priced per layer would be 1.3 ms of 76 to 127 at 25 us each. Microbatches of 1 would lose most, and they take no
  longer per sample than those of 2.
- Slower backwards of softmax and dropout (Megatron). NeuSight's timings of torch 2.1 show 5.9 and 6.7 passes over fp32
  scores. Megatron's softmax is its own kernel, and torch of 2021 has one kernel for dropout. The price is 3 and 3.75
  already.
- The slowest of many GPUs (multi-node A100). Rows of one model on more and more GPUs have the same error: 13B by FSDP
  -1 to +1% on 8 to 128 A100, 175B by NeMo 23.07 -32 to -34% on 64 to 1,024.
- All-reduces beside gradients of weights for vTrain, too. No source states the version of its Megatron-DeepSpeed, and
  its mean error held out rises from 7.6 to 8.7%.
- Still lower clocks on the H100. It now multiplies as fast as the H200, which has the same chip and limit of power: 701
  and 697 TFLOP/s, 680 in the table that is limited by power. That is 2% of the 12% that were missing. Rows dominated by
  products and by attention have the same error, as do those with 5 and 18% of memory-bound operators; A100 rows of the
  same framework do not.
- A sustained clock per GPU as a term of its own. Prices are those of sustained products already: bursts are faster by 1.13
  (H200), 1.22 (GB200) and 1.26 (B200) in the fits. GPUs of which only bursts were published take the gain of their family:
  the H100 that of the H200, which makes it 2% slower than its own fit. Products back to back at the limit of power draw
  more than a step, whose other kernels draw less. So a step is not slower than they are, unless its operands draw more.
  And attention that ran for a second is as fast as in bursts: 0.99 of the seconds on B200 and 0.96 on GB200, over 1,900
  shapes each. Where power was recorded, B200's large products drew 700 of 1,000 W.
- A wider prior of that factor, without products that drew little power: prices move by 0 to 2%, or by 4% on the H200
  where the table of weights that were not initialised is left out.
- Hidden exchanges of experts where recipes say so (moe_a2a_overlap). By the share that the exchange has of each step,
  DeepSeek's rows of 26.06 and later come 20 points nearer. Those of gpt-oss go 10 to 15 points away, and Qwen3 235B on H100
  24, where more than half of the predicted step is exchange.
- The sum of host and GPU (Sailor). The smallest row takes 6.1 ms per layer, of which 2.6 are predicted. Host and GPU
  together would be 4.3, and rows of many samples would still be 1.3 times as slow as predicted.
- B200 without products that drew little power from 1e11 FLOP on, instead of 1e12: the fit moves by 1%. The table of the
  machine that SimuMax's rows ran on is 7% slower than the fit; their attention is 0 to 3% off.
- Shares of operators as explanation of A100 rows (ridge regression of errors on the shares of products, memory-bound
  operators, attention and rings, sources left out in turn): no better than one constant, 9.7 to 9.9%.
- Intervals from the rows that are nearest in split, microbatch, size and model, weighted: 34 to 35% at 89%.
- Two other kinds of intervals, with medians of 36 to 40% at 87 to 89%. The first counts rows between the prediction and
  their middle as inside, whatever the reach. The other is 5 and 95% quantiles.
- Spreads by row: the deviation of errors from the median of similar rows depends on no property of the plan. The rank
  correlations with the share of communication, the spread of prices, GPUs, pipeline, tensor parallelism and microbatches
  are 0.14 at most, with samples per microbatch -0.2. Gaussian processes over these: 30 to 36% at 89 to 92%.
- A kind of its own for rows whose split was assumed, or whose precision is priced as another: 34.0% instead of 34.6.
- Without the bias of BLOOM's rows the median width would be 33%, without that of all groups on A100 29%.
- Centred intervals. Width and coverage stay what they are to a point, and a prediction may lie outside its own interval."""


def _worth() -> str:
    path = FOLDER / "worth.json"
    if not path.is_file():
        return ""
    found = json.loads(path.read_text())

    def shown(entry: Mapping[str, float]) -> str:
        own = f", {entry['one_factor']:.1f}" if "one_factor" in entry else ""
        return f"{entry['mean_error']:.1f} ({entry['bias']:+.1f}{own})"

    lines = [[piece, str(entry["rows"]), shown(entry["before"]), shown(entry["after"])] for piece, entry in found.items()]
    return table(("piece", "rows", "without", "with"), lines, words=1)


def _rules() -> list[list[str]]:
    names: dict[str, list[str]] = {}
    for prefix, framework in FRAMEWORKS.items():
        names.setdefault(framework.name, []).append(prefix)
    known = {framework.name: framework for framework in FRAMEWORKS.values()}
    return [
        [
            name,
            ", ".join(prefixes),
            known[name].recompute,
            str(known[name].zero),
            "yes" if known[name].sequence else "no",
            str(known[name].micro or "16 without a pipeline; with one 4, from hidden 12288 on 1"),
            str(known[name].seq),
            "flash" if known[name].software.flash else "fused softmax",
        ]
        for name, prefixes in names.items()
    ]


def main() -> None:
    """Write the README, or compare it."""
    text = readme(json.loads((FOLDER / "results.json").read_text(encoding="utf-8")))
    path = FOLDER / "README.md"
    if "--write" in sys.argv:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        sys.exit("README.md differs from results.json; run python experiments/published/readme.py --write")


if __name__ == "__main__":
    main()
