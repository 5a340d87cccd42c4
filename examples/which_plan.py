"""How should ResNet-50 be trained on the eight V100s of a DGX-1?"""

import parsim as ps


def main() -> None:
    answer = ps.plan("resnet50", cluster="dgx1-v100-32gb", global_batch=1024)
    print(answer)

    print("\nEvery family's best plan, as a pandas table:")
    print(answer.table()[["plan", "step_s", "peak_memory_bytes", "fits"]].to_string(index=False))

    print("\nWhere the milliseconds of the chosen plan come from:")
    print(answer.chosen.explain())


if __name__ == "__main__":
    main()
