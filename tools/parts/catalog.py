"""What the parts say that no fit gives: which GPUs there are, their rows in the tables, units, and how they are joined.

Peaks, memory, bandwidth, links and prices come from `peaks.csv`, watts from `power.csv` and `power_limit_training.csv`. The
numbers of multiprocessors below carry the document that they were read in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NEUSIGHT = "github sitar-lab/NeuSight scripts/asplos/data/device_configs @6945927d9afc, Num_Sm"
SM_TABLE = "github lijun99/GPU-Resources NVIDIA_GPU_SM.md"
LAMBDA = (
    "huggingface.co/spaces/lambdabrendan/Lambda-LLM-Calculator data/gpu_specs.csv @ed88147: shaders over 128 per multiprocessor"
)
A30_PAGE = "sysrqmts.com, NVIDIA A30 PCIe vs NVIDIA Jetson TX1 GPU: GA100, SM count 56"
A40_PAGE = "hmc-tech.com, NVIDIA L4 vs NVIDIA A40: 10752 shaders over 128 per multiprocessor"
B200_PAGE = "hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200: 148 SMs"
ROCM = "rocm.docs.amd.com, AMD GPU specifications: compute units of CDNA3 accelerators"
TILE_AI = "a public TileLang architecture file, RTX4090: sm_count 128"
LLM_PROF = "github citsjtu2020/LLM-Prof hardware_spec.md @8434c8d19c39"
H20_PAGE = "zangshuxian.com/new/674733024499207168 (78 SM in a Geekbench report; 148 TFLOPS fp16, 74 tf32, 44 fp32; 4.0 TB/s)"
A6000_PAGE = "sysrqmts.com, NVIDIA A16 PCIe vs NVIDIA RTX A6000: 84 SM, 38.71 TFLOPS fp32, 768 GB/s, 300 W"
PRO_6000_PAGE = "topcpu.net, RTX Pro 6000: 188 SM, up to 125 TFLOPS fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogGpu:
    """One GPU to write.

    Attributes:
        peaks: its row of peaks.csv; "": it has none. rows: its names in the tables of timings.
        numbers: by column of peaks.csv, what differs from that row, or all of it; `numbers_from` says where each was read.
        family: GPUs whose fits stand for one another first. chip: those of one chip stand for one without rows before the
            rest of the family; "" where the family has one chip. units: multiprocessors, and where that was read.
        ecc_in_memory: GDDR keeps a sixteenth of its nominal size for error correction.
        decimal_memory: its nominal size counts bytes by the thousand.
        network: what usually joins its nodes; "": nothing is usual.
        lends: its fits stand for other GPUs. Not those of a GPU that few rows tell of, or that is alone in its family.
    """

    name: str
    peaks: str
    description: str
    family: str
    units: tuple[int, str, str]
    chip: str = ""
    rows: tuple[str, ...] = ()
    attention_rows: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("flash", "engine")
    ecc_in_memory: bool = False
    decimal_memory: bool = False
    link: str = "pcie-4"
    host_link: str = "pcie-4"
    network: str = ""
    gpus_per_node: int = 8
    bf16: bool = True
    kind: str = "cuda"
    numbers: Mapping[str, str] = field(default_factory=dict)
    numbers_from: str = ""
    lends: bool = True


GA100, GH100, CDNA3 = "ga100 of 80 gb", "gh100 of 80 gb", "cdna3"
BLACKWELL_ULTRA = "blackwell ultra"
"""Multiplies 4 bits half as fast again as the B200 (peaks.csv), and attention is faster (attention.csv)."""

NO_PRICE: Mapping[str, str] = {"usd_per_gpu_hour": ""}
"""Of a board whose row is that of another one, which is rented at another price."""

GPUS: tuple[CatalogGpu, ...] = (
    CatalogGpu(
        name="a100-sxm-40gb",
        peaks="A100-SXM4-40GB",
        description="NVIDIA A100-SXM4, 40 GB.",
        family="ampere",
        units=(108, "datasheet", f"{NEUSIGHT}, A100-SXM4-40GB"),
        link="nvswitch-3",
        network="infiniband-200g",
    ),
    CatalogGpu(
        name="a100-sxm-80gb",
        peaks="A100-SXM4-80GB",
        description="NVIDIA A100-SXM4, 80 GB.",
        family="ampere",
        chip=GA100,
        units=(108, "measurement", "gist gengwg/3520df2ebf8872e5ee4818367e3a4122: deviceQuery of NVIDIA A100-SXM4-80GB"),
        rows=("A100-SXM4-80GB",),
        attention_rows=("A100-SXM4-80GB", "A100-PCIe-80GB"),
        link="nvswitch-3",
        network="infiniband-200g",
    ),
    CatalogGpu(
        name="a100-pcie-40gb",
        peaks="A100-PCIe-40GB",
        description="NVIDIA A100 PCIe, 40 GB.",
        family="ampere",
        units=(108, "datasheet", f"{NEUSIGHT}, A100-PCIE-40GB"),
        rows=("A100-PCIe-40GB",),
        link="pcie-4",
    ),
    CatalogGpu(
        name="a100-pcie-80gb",
        peaks="A100-PCIe-80GB",
        description="NVIDIA A100 PCIe, 80 GB.",
        family="ampere",
        units=(108, "datasheet", f"{NEUSIGHT}, A100 80GB PCIe"),
        rows=("A100-PCIe-80GB",),
        attention_rows=("A100-PCIe-80GB",),
        link="pcie-4",
    ),
    CatalogGpu(
        name="a30",
        peaks="A30",
        description="NVIDIA A30, 24 GB.",
        family="ampere",
        units=(56, "datasheet", A30_PAGE),
        link="pcie-4",
    ),
    CatalogGpu(
        name="h100-sxm",
        peaks="H100-SXM5-80GB",
        description="NVIDIA H100-SXM5, 80 GB.",
        family="hopper",
        chip=GH100,
        units=(132, "datasheet", f"{NEUSIGHT}, H100 80GB HBM3"),
        rows=("H100-SXM5-80GB",),
        attention_rows=("H100-SXM5-80GB", "H100 (unnamed in thread)", "H200 (assumed)"),
        attention=("flash",),
        link="nvswitch-4",
        network="infiniband-400g",
        host_link="pcie-5",
    ),
    CatalogGpu(
        name="h100-pcie",
        peaks="H100-PCIe-80GB",
        description="NVIDIA H100 PCIe, 80 GB.",
        family="hopper",
        units=(114, "datasheet", SM_TABLE),
        attention=("flash",),
        link="pcie-5",
        host_link="pcie-5",
    ),
    CatalogGpu(
        name="h200",
        peaks="H200-SXM-141GB",
        description="NVIDIA H200-SXM, 141 GB.",
        family="hopper",
        units=(132, "datasheet", SM_TABLE),
        rows=("H200-SXM-141GB",),
        attention_rows=("H200 (assumed)", "H200-SXM-141GB"),
        attention=("flash",),
        link="nvswitch-4",
        network="infiniband-400g",
        host_link="pcie-5",
    ),
    CatalogGpu(
        name="b200",
        peaks="B200-SXM",
        description="NVIDIA B200-SXM, 180 GB.",
        family="blackwell",
        units=(148, "datasheet", B200_PAGE),
        rows=("B200-SXM",),
        attention_rows=("B200-SXM",),
        attention=("cudnn", "engine"),
        link="nvswitch-5",
        network="infiniband-400g",
        host_link="pcie-5",
    ),
    CatalogGpu(
        name="gb200",
        peaks="GB200",
        description="NVIDIA GB200 (one of the two GPUs of a superchip), 186 GB.",
        family="blackwell",
        units=(148, "assumption", f"as the B200, the same two dies ({B200_PAGE})"),
        rows=("GB200",),
        attention_rows=("GB200",),
        attention=("cudnn",),
        link="nvlink-rack-5",
        network="infiniband-400g",
        host_link="pcie-5",
        gpus_per_node=72,
    ),
    CatalogGpu(
        name="b300",
        peaks="B300-SXM",
        description="NVIDIA B300-SXM, 288 GB.",
        family="blackwell",
        chip=BLACKWELL_ULTRA,
        units=(148, "assumption", f"as the B200, the same two dies ({B200_PAGE})"),
        rows=("B300-SXM",),
        attention=("cudnn",),
        decimal_memory=True,
        link="nvswitch-5",
        network="infiniband-800g",
        host_link="pcie-5",
    ),
    CatalogGpu(
        name="gb300",
        peaks="GB300",
        description="NVIDIA GB300 (one of the two GPUs of a superchip), 288 GB.",
        family="blackwell",
        chip=BLACKWELL_ULTRA,
        units=(148, "assumption", f"as the B200, the same two dies ({B200_PAGE})"),
        rows=("GB300",),
        attention_rows=("GB300",),
        attention=("cudnn",),
        decimal_memory=True,
        link="nvlink-rack-5",
        network="infiniband-800g",
        host_link="pcie-5",
        gpus_per_node=72,
    ),
    CatalogGpu(
        name="l40s",
        peaks="L40S",
        description="NVIDIA L40S, 48 GB.",
        family="ada",
        units=(142, "datasheet", SM_TABLE),
        rows=("L40S",),
        ecc_in_memory=True,
    ),
    CatalogGpu(
        name="a40",
        peaks="A40",
        description="NVIDIA A40, 48 GB.",
        family="ga10x",
        units=(84, "derived", A40_PAGE),
        rows=("A40",),
        ecc_in_memory=True,
    ),
    CatalogGpu(
        name="a10",
        peaks="A10",
        description="NVIDIA A10, 24 GB.",
        family="ga10x",
        units=(
            72,
            "derived",
            "github RajBhope/gpu-runtime-predictor catalog: 9216 CUDA cores (of the A10G, same chip) over 128",
        ),
        ecc_in_memory=True,
        gpus_per_node=4,
    ),
    CatalogGpu(
        name="l4",
        peaks="L4",
        description="NVIDIA L4, 24 GB.",
        family="ada",
        units=(60, "datasheet", f"{NEUSIGHT}, L4 (7424 CUDA cores over 128 would be 58)"),
        rows=("L4",),
        ecc_in_memory=True,
    ),
    CatalogGpu(
        name="t4",
        peaks="T4",
        description="NVIDIA T4, 16 GB.",
        family="turing",
        units=(40, "datasheet", f"{NEUSIGHT}, T4"),
        rows=("T4",),
        ecc_in_memory=True,
        link="pcie-3",
        host_link="pcie-3",
        gpus_per_node=4,
        bf16=False,
    ),
    CatalogGpu(
        name="rtx-3090",
        peaks="RTX-3090",
        description="NVIDIA GeForce RTX 3090, 24 GB.",
        family="ga10x",
        units=(82, "derived", f"{LAMBDA}: 10496"),
        rows=("RTX-3090",),
        gpus_per_node=4,
    ),
    CatalogGpu(
        name="rtx-4090",
        peaks="RTX-4090",
        description="NVIDIA GeForce RTX 4090, 24 GB.",
        family="ada",
        units=(128, "datasheet", TILE_AI),
        rows=("RTX-4090",),
        gpus_per_node=4,
    ),
    CatalogGpu(
        name="mi300x",
        peaks="MI300X",
        description="AMD Instinct MI300X, 192 GB.",
        family="cdna3",
        chip=CDNA3,
        units=(304, "datasheet", ROCM),
        rows=("MI300X",),
        link="infinity-fabric-3",
        network="roce-400g",
        host_link="pcie-5",
    ),
    CatalogGpu(
        name="h800-sxm",
        peaks="H100-SXM5-80GB",
        description="NVIDIA H800-SXM5, 80 GB: an H100 with eight lanes of NVLink.",
        family="hopper",
        chip=GH100,
        units=(132, "assumption", "as the H100-SXM5: the same die and the same peaks"),
        numbers=NO_PRICE,
        numbers_from=f"all as the H100's, of which {LLM_PROF} tells the same of the H800 (989 TFLOPS fp16, 3350 GB/s, 80 GB)",
        attention=("flash",),
        link="nvswitch-4-h800",
        network="infiniband-400g",
        host_link="pcie-5",
        lends=False,
    ),
    CatalogGpu(
        name="a800-sxm-80gb",
        peaks="A100-SXM4-80GB",
        description="NVIDIA A800-SXM4, 80 GB: an A100 with eight lanes of NVLink.",
        family="ampere",
        chip=GA100,
        units=(108, "assumption", "as the A100-SXM4: the same die and the same peaks"),
        numbers=NO_PRICE,
        numbers_from=f"all as the A100's, of which {LLM_PROF} tells the same of the A800 (312 TFLOPS fp16, 2039 GB/s, 80 GB)",
        link="nvswitch-3-a800",
        network="infiniband-200g",
        lends=False,
    ),
    CatalogGpu(
        name="h20",
        peaks="",
        description="NVIDIA H20-SXM5, 96 GB.",
        family="hopper",
        units=(78, "measurement", H20_PAGE),
        numbers={
            "fp32_tflops": "44",
            "tf32_tflops": "74",
            "fp16_bf16_tflops": "148",
            "fp8_tflops": "296",
            "memory_gb": "96",
            "memory_gbs": "4000",
            "tdp_w": "400",
        },
        numbers_from=f"{H20_PAGE}; fp8 as int8; 96 GB, 400 W and NVLink at 900 GB/s: willitrunai.com/es/gpus/h20-96gb",
        attention=("flash",),
        link="nvswitch-4",
        network="infiniband-400g",
        host_link="pcie-5",
        lends=False,
    ),
    CatalogGpu(
        name="rtx-a6000",
        peaks="RTX-A6000",
        description="NVIDIA RTX A6000, 48 GB.",
        family="ga10x",
        units=(84, "datasheet", A6000_PAGE),
        rows=("RTX-A6000",),
        numbers={"fp32_tflops": "38.71"},
        numbers_from=f"fp32: {A6000_PAGE}",
        ecc_in_memory=True,
        gpus_per_node=4,
        lends=False,
    ),
    CatalogGpu(
        name="a10g",
        peaks="A10G",
        description="NVIDIA A10G, 24 GB.",
        family="ga10x",
        units=(72, "derived", "github RajBhope/gpu-runtime-predictor catalog: 9216 CUDA cores over 128"),
        ecc_in_memory=True,
        lends=False,
    ),
    CatalogGpu(
        name="rtx-pro-6000",
        peaks="RTX-PRO-6000-BW-Server",
        description="NVIDIA RTX PRO 6000 Blackwell, server edition, 96 GB.",
        family="gb20x",
        units=(188, "datasheet", SM_TABLE),
        rows=("RTX-PRO-6000-BW-Server", "RTX-PRO-6000-BW"),
        numbers={"fp32_tflops": "125"},
        numbers_from=f"fp32: {PRO_6000_PAGE}",
        ecc_in_memory=True,
        link="pcie-5",
        host_link="pcie-5",
        lends=False,
    ),
    CatalogGpu(
        name="mi325x",
        peaks="MI325X",
        description="AMD Instinct MI325X, 256 GB.",
        family="cdna3",
        chip=CDNA3,
        units=(304, "datasheet", ROCM),
        link="infinity-fabric-3",
        network="roce-400g",
        host_link="pcie-5",
        lends=False,
    ),
    CatalogGpu(
        name="mi355x",
        peaks="MI355X",
        description="AMD Instinct MI355X, 288 GB.",
        family="cdna4",
        units=(256, "datasheet", "rocm.docs.amd.com, AMD GPU specifications: compute units of CDNA4 accelerators"),
        rows=("MI355X", "MI355X (gfx950)"),
        numbers={"fp4_tflops": ""},
        numbers_from="its peak in 4 bits is of another format than nvfp4, and left out",
        link="infinity-fabric-4",
        network="roce-400g",
        host_link="pcie-5",
        lends=False,
    ),
)

V100_MEMORY = {"16gb": 16, "32gb": 32}
V100_FORMS: Mapping[str, tuple[str, str, str]] = {
    "v100-sxm-16gb": ("dgx1-v100-16gb", "nvlink-2-cube", "NVIDIA V100-SXM2, 16 GB."),
    "v100-sxm-32gb": ("dgx1-v100-32gb", "nvlink-2-cube", "NVIDIA V100-SXM2, 32 GB."),
    "v100-sxm3-32gb": ("dgx2-v100", "nvswitch-2", "NVIDIA V100-SXM3, 32 GB."),
    "v100-pcie-16gb": ("pcie-8xv100", "pcie-3", "NVIDIA V100-PCIe, 16 GB."),
}
"""V100s take over the numbers and fits of the shipped profile of a machine that has them: profile, link, description."""

REPORTED_SHARE = 85198045184 / (80 * 2**30)
"""Bytes that an A100-SXM4-80GB reports over 80 GiB (deviceQuery, gist gengwg/3520df2ebf8872e5ee4818367e3a4122)."""
ECC_SHARE = 15 / 16
"""Of a T4's nominal 16 GB, what NeuSight's Dev_Mem says: 15."""

CONTEXT_BYTES = 700 * 2**20

IDLE: Mapping[str, tuple[float, str]] = {
    "h200": (80.3, "api.serialalice.pt, GPU energy benchmark: H200 SXM idle (80.3 W), measured in 2026"),
}
LAUNCHES = "NVIDIA/TransformerEngine issue 2053 (thread text, 2025-08-11)"
X86_LAUNCH = (
    "assumption",
    f"as on an H100 DGX (Xeon 8480C), 13.48 us of the host for a forward of torch.nn.Linear: {LAUNCHES}; "
    "no measurement of this machine's host was found",
    13.48e-6,
)
LINEAR = "host time of a forward of torch.nn.Linear, hidden 2048, 8192 tokens, bf16, on"
LAUNCH: Mapping[str, tuple[str, str, float]] = {
    "h100-sxm": ("measurement", f"{LINEAR} an H100 DGX (Xeon 8480C): {LAUNCHES}", 13.48e-6),
    "gb200": ("measurement", f"{LINEAR} a GB200 (Grace): {LAUNCHES}", 37.08e-6),
    "gb300": ("assumption", f"as on a GB200, which has the same host (Grace): {LAUNCHES}", 37.08e-6),
    **dict.fromkeys(("h200", "b200", "b300", "a100-sxm-80gb", "a100-sxm-40gb", "h800-sxm", "a800-sxm-80gb", "h20"), X86_LAUNCH),
}
"""Host seconds per operator of eager torch: kind of source, its text, seconds."""
BUSY_ROWS: Mapping[str, tuple[str, str]] = {
    "h200": ("H200-SXM-141GB", "gemm bf16"),
    "b200": ("B200-SXM", "gemm bf16"),
    "gb200": ("GB200", "gemm bf16"),
    "h100-sxm": ("H100-SXM5-80GB", "inference text-to-video"),
}
"""Rows of power.csv: products of 1e11 to 1e12 FLOP, else the computation that loads the GPU most of those measured."""
ZEUS_ROWS: Mapping[str, tuple[str, float]] = {
    "a40": ("A40", 300.0),
    "v100-sxm-16gb": ("V100", 250.0),
    "v100-pcie-16gb": ("V100", 250.0),
}
"""Rows of power_limit_training.csv: whole trainings at the highest power limit."""
