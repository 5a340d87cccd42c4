"""Plan for this machine, train for real under the plan, and set every kind of task against its prediction."""

import parsim as ps


def main() -> None:
    answer = ps.plan("resnet_small", cluster="this-machine", global_batch=32)  # calibrates for a minute, once
    print(answer.sentence())

    measured = ps.run(answer.chosen)
    measured.compare()
    print(f"loss: {measured.losses[0]:.3f} at first, {measured.losses[-1]:.3f} at last")


if __name__ == "__main__":
    main()
