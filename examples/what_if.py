"""What if one rank is 30% slower and a link fades? The same plans, simulated undisturbed and under a scenario."""

from pathlib import Path

import pandas as pd

import parsim as ps

SCENARIO = Path(__file__).with_name("what_if.toml")


def main() -> None:
    answer = ps.plan("vit_b_16", cluster="dgx1-v100-32gb", global_batch=512)
    rows = []
    for candidate in answer.candidates:
        if candidate.plan.world_size < 8:
            continue  # the scenario names rank 3
        disturbed = ps.simulate(candidate, engine="dynamic", scenario=SCENARIO)
        before, after = candidate.step_s.median, disturbed.step_s.median
        rows.append(
            {"plan": candidate.plan.summary(), "ms": 1e3 * before, "ms disturbed": 1e3 * after, "slower": after / before - 1}
        )
    table = pd.DataFrame(rows).sort_values("ms disturbed")
    print(table.to_string(index=False, formatters={"slower": "{:.0%}".format}, float_format="%.1f"))


if __name__ == "__main__":
    main()
