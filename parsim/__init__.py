"""parsim: which way of training this model on this cluster is fastest, how long it takes, whether it fits, how sure we are.

    import parsim as ps
    answer = ps.plan("resnet50", cluster="dgx1-v100-32gb", global_batch=1024)
    print(answer)                  # the answer in a sentence, then the ranked plans
    answer.chosen.breakdown()      # pandas: where the step of each rank goes
    measured = ps.run(ps.plan("resnet_small", cluster="this-machine", global_batch=32))
    measured.compare()             # predicted against measured

Model -> Plan -> TaskGraph -> Timeline, and the same graph is run for real. Start reading at `parsim.search.search`.
Names are imported when they are used: `import parsim` alone loads none of the large packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parsim.app.answer import Answer
    from parsim.app.calibration import Calibration
    from parsim.app.check import Checked
    from parsim.app.foreign import import_file
    from parsim.app.functions import calibrate, check, load_cluster, plan, simulate, trace
    from parsim.app.measured import Measured
    from parsim.app.prediction import Prediction
    from parsim.app.prices import cost
    from parsim.app.relaxed import bench_graphs
    from parsim.app.sweep.sweep import sweep
    from parsim.app.train import open_run, run, validate
    from parsim.app.watch import watch
    from parsim.errors import ParsimError
    from parsim.hardware.cluster import Cluster
    from parsim.model.model import Model
    from parsim.plans.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Calibration",
    "Checked",
    "Cluster",
    "Measured",
    "Model",
    "ParsimError",
    "Plan",
    "Prediction",
    "__version__",
    "bench_graphs",
    "calibrate",
    "check",
    "cost",
    "import_file",
    "load_cluster",
    "open_run",
    "plan",
    "run",
    "simulate",
    "sweep",
    "trace",
    "validate",
    "watch",
]

_HOMES = {
    "Answer": "parsim.app.answer",
    "Calibration": "parsim.app.calibration",
    "Checked": "parsim.app.check",
    "Cluster": "parsim.hardware.cluster",
    "Measured": "parsim.app.measured",
    "Model": "parsim.model.model",
    "ParsimError": "parsim.errors",
    "Plan": "parsim.plans.plan",
    "Prediction": "parsim.app.prediction",
    "bench_graphs": "parsim.app.relaxed",
    "import_file": "parsim.app.foreign",
    "sweep": "parsim.app.sweep.sweep",
    **dict.fromkeys(("calibrate", "check", "load_cluster", "plan", "simulate", "trace"), "parsim.app.functions"),
    **dict.fromkeys(("open_run", "run", "validate"), "parsim.app.train"),
    "cost": "parsim.app.prices",
    "watch": "parsim.app.watch",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'parsim' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
