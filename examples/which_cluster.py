"""Is NVLink worth it, and are two machines better than one? VGG-16 with the same batch per GPU on four clusters."""

import pandas as pd

import parsim as ps

BATCH_PER_GPU = 32

CLUSTERS = (
    ("8xv100-sxm-16gb", None),
    ("8xv100-pcie-16gb", None),
    ("16xv100-sxm-16gb", "infiniband-100g"),
    ("16xv100-sxm-16gb", "ethernet-10g"),
)


def main() -> None:
    rows = []
    for cluster, network in CLUSTERS:
        gpus = int(cluster.split("x")[0])
        answer = ps.plan("vgg16", cluster=cluster, network=network, global_batch=BATCH_PER_GPU * gpus)
        best = answer.chosen
        rows.append(
            {
                "cluster": cluster + (f", {network}" if network else ""),
                "plan": best.plan.summary(),
                "ms a step": 1e3 * best.step_s.median,
                "samples/s": best.throughput_samples_per_s.median,
                "samples/s per GPU": best.throughput_samples_per_s.median / gpus,
            }
        )
    print(pd.DataFrame(rows).round(1).to_string(index=False))


if __name__ == "__main__":
    main()
