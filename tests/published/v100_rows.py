"""Published rows that the accuracy tests of the V100 need, so that these run without the tables.

Source: throughput.csv, collectives.csv and operators.csv of the published V100 tables, by id; of the collectives the sizes that
a test bounds, of the products of matrices every eighth large one. The 60 all_reduce of vTrain are in the profile itself
(`CollectivePoint`). `test_v100_whole_models` compares these rows with the tables where they are.
"""

from __future__ import annotations

from parsim.hardware.compose import load_profile
from tools.published.v100_collectives import MACHINES, CollectiveRow, Machine, transfer_row
from tools.published.v100_throughput import PublishedRow

THROUGHPUT = """
thr-dle-0371 resnet50 fp32 112 1 367.0
thr-dle-0372 resnet50 amp_fp16 256 1 1200.0
thr-dle-0384 resnet50 amp_fp16 256 1 1156.0
thr-dlperf-0004 resnet50 fp32 128 1 367.29
thr-dlperf-0007 resnet50 fp32 128 1 348.62
thr-dlperf-0012 resnet50 fp32 128 8 2887.65
thr-dlperf-0067 bert-base fp32 32 1 119.6
thr-dlperf-0073 bert-base fp32 32 8 921.32
thr-dlperf-0091 bert-base fp32 48 1 121.94
thr-dlperf-0116 bert-base amp_fp16 64 1 444.51
thr-dlperf-0144 bert-base amp_fp16 96 1 462.35
thr-dlperf-0206 gpt-1536x16 amp_fp16 2 1 4.31
thr-dlperf-0214 gpt-768x12 amp_fp16 8 1 13.09
thr-dlperf-0241 bert-base fp32 32 1 119.6
thr-dlperf-0246 bert-base fp32 48 1 121.94
thr-dlperf-0251 bert-base amp_fp16 64 1 444.51
thr-dlperf-0256 bert-base amp_fp16 64 1 426.53
thr-dlperf-0259 bert-base amp_fp16 96 1 462.35
thr-dlperf-0264 bert-base amp_fp16 96 1 465.23
thr-dlperf-0267 resnet50 fp32 128 1 367.29
thr-dlperf-0280 resnet50 fp32 128 1 306.35
thr-dlperf-0285 resnet50 fp32 128 1 348.62
thr-dlperf-0290 resnet50 fp32 128 1 354.44
thr-dlperf-0295 resnet50 fp32 128 1 350.66
"""
"""Id, model, precision, batch, GPUs, samples per second."""

COLLECTIVES = """
col-nccltests-0043 log all_reduce 16777216 324.1
col-nccltests-0045 log all_reduce 33554432 550.8
col-nccltests-0047 log all_reduce 67108864 992.7
col-nccltests-0049 log all_reduce 134217728 1818.8
col-nccltests-0051 oracle all_reduce 1073741824 13867
col-nccltests-0083 p3dn all_reduce 8 145.4
col-nccltests-0085 p3dn all_reduce 64 137.7
col-nccltests-0087 p3dn all_reduce 1024 151
col-nccltests-0089 p3dn all_reduce 8192 144.6
col-nccltests-0091 p3dn all_reduce 65536 167.7
col-nccltests-0093 p3dn all_reduce 262144 243.9
col-nccltests-0095 p3dn all_reduce 524288 309
col-nccltests-0097 p3dn all_reduce 1048576 709.3
col-nccltests-0099 p3dn all_reduce 2097152 1116.4
col-nccltests-0101 p3dn all_reduce 4194304 2088.9
col-nccltests-0103 p3dn all_reduce 8388608 2869.7
col-nccltests-0105 p3dn all_reduce 16777216 4631.7
col-nccltests-0107 p3dn all_reduce 33554432 8769.2
col-nccltests-0109 p3dn all_reduce 67108864 16964
col-nccltests-0111 p3dn all_reduce 134217728 33403
col-nccltests-0113 p3dn all_reduce 268435456 59045
col-nccltests-0115 p3dn all_reduce 536870912 115842
col-nccltests-0117 p3dn all_reduce 1073741824 228178
col-nccltests-0225 dgx2 broadcast 16777216 217
col-nccltests-0227 dgx2 broadcast 33554432 362.1
col-nccltests-0229 dgx2 broadcast 67108864 635.5
col-nccltests-0231 dgx2 broadcast 134217728 1192.9
col-nccltests-0233 dgx2 broadcast 268435456 2283.9
col-nccltests-0235 dgx2 broadcast 536870912 4482.5
col-nccltests-0237 dgx2 broadcast 1073741824 8856.1
col-nccltests-0239 dgx2 broadcast 2147483648 17632
col-nccltests-0241 dgx2 broadcast 4294967296 35198
col-nccltests-0243 dgx2 broadcast 8589934592 70321
"""
"""Id, a word for the machine, operation, bytes of the array, microseconds; out of place."""

TRANSFERS = {"col-taccl-0018": ("double link", 23.0), "col-taccl-0019": ("single link", 46.0)}
"""Microseconds of 1 MB from GPU to GPU."""

PRODUCTS = """
ops-neusight-0242 bmm_fwd 49 480 865 451 1.73497
ops-neusight-0297 bmm_fwd 75 256 680 965 2.06094
ops-neusight-0374 bmm_fwd 224 491 476 213 2.17397
ops-neusight-0388 bmm_fwd 187 757 573 172 3.04181
ops-neusight-0441 bmm_fwd 299 271 349 257 1.98206
ops-neusight-0450 bmm_fwd 457 685 113 728 5.14909
ops-neusight-0455 bmm_fwd 267 538 771 106 3.6147
ops-neusight-0484 bmm_fwd 785 86 478 180 1.5387
ops-neusight-0498 bmm_fwd 968 248 576 230 6.32459
ops-neusight-0510 bmm_fwd 713 418 785 196 10.82084
ops-neusight-0517 bmm_fwd 984 605 80 938 8.98763
ops-neusight-1105 linear_fwd 1 118 1025 55979 1.26906
ops-neusight-1163 linear_fwd 1 402 1861 24832 3.77118
ops-neusight-1180 linear_fwd 1 327 5438 22717 7.68838
ops-neusight-1214 linear_fwd 1 825 1667 19079 4.69979
ops-neusight-1228 linear_fwd 1 698 4319 2288 1.27699
ops-neusight-1255 linear_fwd 1 2034 523 15139 2.64508
ops-neusight-1270 linear_fwd 1 1166 3170 3708 2.37014
ops-neusight-1280 linear_fwd 1 1260 4532 8777 8.55249
ops-neusight-1299 linear_fwd 1 3349 467 58418 15.18133
ops-neusight-1314 linear_fwd 1 2731 1745 15263 11.953
ops-neusight-1324 linear_fwd 1 3849 2553 57352 94.45606
ops-neusight-1338 linear_fwd 1 7186 143 5649 1.05696
ops-neusight-1354 linear_fwd 1 4615 669 2931 1.50796
ops-neusight-1364 linear_fwd 1 8185 1819 7719 18.50646
ops-neusight-1373 linear_fwd 1 7780 2593 13549 43.9406
ops-neusight-1381 linear_fwd 1 6289 7134 12367 110.05262
ops-neusight-1403 linear_fwd 1 469 15562 965 1.29171
ops-neusight-1414 linear_fwd 1 419 44049 556 2.12227
ops-neusight-1425 linear_fwd 1 1005 20738 1003 3.5355
ops-neusight-1434 linear_fwd 1 557 65033 4915 36.01457
ops-neusight-1443 linear_fwd 1 1041 27265 1652 7.85716
ops-neusight-1451 linear_fwd 1 1814 55546 7591 140.75935
ops-neusight-1459 linear_fwd 1 2877 25884 814 11.87298
ops-neusight-1467 linear_fwd 1 2237 55373 7294 162.85732
ops-neusight-1476 linear_fwd 1 6745 23093 855 21.93306
"""
"""Id, operation, problems, rows, columns, depth, milliseconds of a product of matrices in fp32 on a V100-PCIE-32GB."""

WORDS = {
    "log": "cube mesh, one process drives",
    "oracle": "cube mesh, Oracle",
    "p3dn": "two p3dn nodes",
    "dgx2": "12 of 16 GPUs of a DGX-2",
}
"""Of a machine, how its sentence begins."""

VTRAIN = "vtrain"
"""Source of the points in the profile of the cube mesh."""


def published_rows() -> list[PublishedRow]:
    """Throughput of whole models."""
    found = []
    for line in THROUGHPUT.split("\n")[1:-1]:
        name, model, precision, batch, gpus, rate = line.split()
        found.append(PublishedRow(id=name, case=(model, precision, int(batch), int(gpus)), samples_per_s=float(rate)))
    return found


def collective_rows() -> list[CollectiveRow]:
    """Collectives and transfers, vTrain's from the profile."""
    found = [transfer_row(name, notes, microseconds) for name, (notes, microseconds) in TRANSFERS.items()]
    for line in COLLECTIVES.split("\n")[1:-1]:
        name, word, operation, size, microseconds = line.split()
        machine = next(each for each in MACHINES if each.what.startswith(WORDS[word]))
        ranks = {"p3dn": 16, "dgx2": 12}.get(word, 8)
        found.append(_row(name, machine, operation, tuple(range(ranks)), int(size), float(microseconds) * 1e-6))
    for number, point in enumerate(load_profile(MACHINES[0].profile).communication.points):
        if point.source == VTRAIN:
            found.append(
                _row(f"vtrain {number}", MACHINES[0], point.operation, tuple(point.group), point.size_bytes, point.seconds)
            )
    return found


def _row(name: str, machine: Machine, operation: str, group: tuple[int, ...], size_bytes: int, seconds: float) -> CollectiveRow:
    return CollectiveRow(id=name, machine=machine, operation=operation, group=group, size_bytes=size_bytes, seconds=seconds)


def products() -> list[tuple[str, tuple[int, int, int, int], float]]:
    """Operation; problems, rows, columns and depth; seconds."""
    words = [line.split() for line in PRODUCTS.split("\n")[1:-1]]
    return [(operation, (int(b), int(m), int(n), int(k)), float(ms) / 1e3) for _, operation, b, m, n, k, ms in words]
