"""Datasheet profile, until parts."""
from __future__ import annotations
import importlib.resources, json
from parsim.hardware.profile import Profile
CHIPS = {
 # tflops16, fp8, HBM TB/s, GB, nvlink GB/s per direction
 "a100-40gb-sxm": (312e12, 0, 1.555e12, 40*2**30, 240e9),
 "a100-80gb-sxm": (312e12, 0, 2.039e12, 80*2**30, 240e9),
 "h100-sxm": (989e12, 1979e12, 3.35e12, 80*2**30, 370e9),
 "h200": (989e12, 1979e12, 4.8e12, 141*10**9, 370e9),
 "b200": (2250e12, 4500e12, 8e12, 180*10**9, 740e9),
 "gb200": (2500e12, 5000e12, 8e12, 186*10**9, 740e9),
 "v100-sxm3-32gb": (125e12, 0, 0.9e12, 32*2**30, 124e9),
}
def provisional_profile(machine, count):
    d = json.loads(importlib.resources.files("hardware_profiles").joinpath("dgx2-v100.json").read_text())
    t, f8, bw, mem, link = CHIPS[machine.gpu]
    if machine.memory_gb: mem = machine.memory_gb*1e9
    dt = d["device_types"].pop("V100-SXM3")
    dt["memory_bytes"]["value"] = mem; dt["memory_bandwidth_bytes_per_s"]["value"] = bw*machine.bandwidth
    src = dt["peak_flop_per_s"]["fp32"]["source"]
    dt["peak_flop_per_s"] = {k: {"value": v, "source": src} for k, v in {"bf16": t, "amp_bf16": t, "amp_fp16": t, "fp32": t/16, "fp8": f8 or t}.items()}
    d["device_types"][machine.gpu] = dt
    d["devices"] = [{"index": i, "type": machine.gpu} for i in range(count)]
    for kind in d["link_kinds"]: pass
    d["link_kinds"]["nvlink"]["bandwidth_bytes_per_s"]["value"] = link
    d["link_kinds"]["pcie"]["bandwidth_bytes_per_s"]["value"] = 100e9
    d["link_kinds"]["smp"]["bandwidth_bytes_per_s"]["value"] = 100e9
    links = [{"a": f"gpu{i}", "b": "nvswitch0", "kind": "nvlink", "lanes": 1} for i in range(count)] if count > 1 else []
    links += [{"a": f"gpu{i}", "b": f"pcie{i}", "kind": "pcie"} for i in range(count)]
    links += [{"a": f"pcie{i}", "b": "socket0", "kind": "pcie"} for i in range(count)]
    d["links"] = links
    d["nics"] = [{"at": f"pcie{i}", "kind": "pcie"} for i in range(count)]
    d["communication"].pop("points", None)
    d["communication"]["link_model"]["tuner_bandwidth_bytes_per_s"]["value"] = link
    d["communication"]["link_model"]["measured_groups"] = []
    base = {"precision": "bf16", "device_type": machine.gpu, "relative_sigma": 0.08, "min_flop": 1e6, "max_flop": 1e14, "points": 1, "source": src}
    common = {"peak_flop_per_s": t*machine.clock, "memory_bandwidth_bytes_per_s": bw*machine.bandwidth}
    mm = {"floor_s": 5e-6, "efficiency_dense": 0.80, "half_rows": 20., "half_columns": 60., "half_depth": 200., "wave_outputs": 90000., "bandwidth_fraction": 0.8, **common}
    mb = {"floor_s": 4e-6, "bandwidth_fraction": 0.85, **common}
    d["compute"] = {"operator_fits": [{**base, "kind": "matmul", "phase": "forward", "coefficients": mm}, {**base, "kind": "memory_bound", "phase": "forward", "coefficients": mb}]}
    for k in ("overlap","noise","updates","speed","today"): d.pop(k, None) if k != "noise" else None
    return Profile.model_validate(d)
