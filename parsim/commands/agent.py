"""`parsim mcp`: parsim's questions as the tools of an agent, over the Model Context Protocol on stdin and stdout.

A tool answers with the text that the command prints, and with its figures as JSON. An agent may not name code: models are those
with a name, files of Hugging Face and saved Models. Run files follow the rules of `--allow-code`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import parsim
from parsim.errors import ConfigError, ParsimError, require
from parsim.files import finite

if TYPE_CHECKING:
    from parsim.app.answer import Answer

INSTRUCTIONS = """
parsim predicts the training of neural networks on GPU clusters: which division of the work is fastest, seconds per step with
a 90% interval, memory, days and price. Ask `plan` first. Where nothing fits, take more or larger GPUs, or settings such as
{"training.precision": "bf16"}. `sweep` compares clusters or batches in one call. `explain` says where the time of a step goes.
Clusters are written as 8xh100-sxm or 64xa100-sxm-80gb; more than one node needs a network such as infiniband-400g.
Answers name what was assumed: pass what you know instead.
"""
GivenKeys = dict[str, Any]
"""Keys of a run file, with their table."""
SHOWN = (
    *("plan", "step_s", "throughput_samples_per_s", "tokens_per_s", "mfu", "peak_memory_bytes", "fit_probability"),
    *("usd_per_million_samples", "run_s", "run_usd", "reason"),
)
"""Columns of a sweep that an agent is given."""


def plan(
    model: str, cluster: str, global_batch: int, network: str | None = None, settings: GivenKeys | None = None
) -> dict[str, Any]:
    """Rank the plans that train a model on a cluster, and choose one: seconds per step, memory, whether it fits.

    Args:
        model: a name such as "llama3-8b" or "resnet50", or the path of a Hugging Face config.json or of a run file.
        cluster: such as "8xh100-sxm", or the name of a profile. network: between nodes, such as "infiniband-400g".
        global_batch: samples per step over all replicas; of a language model one sample is one sequence.
        settings: keys of a run file, such as {"training.precision": "bf16", "model.args.seq": 8192, "training.tokens": 1e12}.
    """
    answer = _asked(model, cluster, global_batch, network, settings)
    return _figures(answer) | {"text": str(answer)}


def check(
    model: str, cluster: str, global_batch: int, network: str | None = None, settings: GivenKeys | None = None
) -> dict[str, Any]:
    """Say whether a training fits, how fast it is, which line of memory decides, and up to three changes that would help.
    Arguments as for `plan`; settings such as {"plan.mesh": {"dp": 8}, "plan.zero_stage": 3} fix the plan."""
    checked = parsim.check(_no_code(model), cluster, global_batch=global_batch, settings=_settings(network, settings))
    document = checked.to_dict()
    shown = ("verdict", "step_s", "largest_line", "needed_bytes", "limit_bytes", "mfu", "helps", "assumed")
    told: dict[str, Any] = finite({**{key: document[key] for key in shown}, "text": str(checked)})
    return told


def explain(
    model: str, cluster: str, global_batch: int, network: str | None = None, settings: GivenKeys | None = None
) -> dict[str, Any]:
    """Say where the seconds of a step go: compute, exposed communication, bubbles, and the largest kinds of task with their
    prices. Arguments as for `plan`; of the plan that it chooses."""
    answer = _asked(model, cluster, global_batch, network, settings)
    return _figures(answer) | {"text": str(answer.prediction.explain())}


def sweep(
    model: str,
    over: dict[str, Any],
    cluster: str | None = None,
    global_batch: int | None = None,
    network: str | None = None,
    settings: GivenKeys | None = None,
    goal: str | None = None,
) -> dict[str, Any]:
    """Ask one question at many points, and pick the best of them. Other arguments as for `plan`.

    Args:
        over: key -> values, such as {"cluster.profile": ["8xh100-sxm", "8xa100-sxm-80gb"]} or {"training.global_batch":
            [256, 512]}. What is swept needs no argument of its own.
        goal: such as "min step" or "min cost where epoch < 2h".
    """
    keys = _settings(network, settings)
    swept = parsim.sweep(_no_code(model), over, cluster=cluster, global_batch=global_batch, settings=keys, goal=goal, jobs=1)
    shown = ("status", *(axis.key for axis in swept.axes), *SHOWN)
    points = [{key: row.get(key) for key in shown if row.get(key) is not None} for row in swept.rows]
    document: dict[str, Any] = finite({"points": points, "best": swept.to_dict()["best"], "text": str(swept)})
    return document


TOOLS: tuple[Callable[..., dict[str, Any]], ...] = (plan, check, explain, sweep)


def mcp() -> None:
    """Serve plan, check, explain and sweep to an agent (Model Context Protocol on stdin and stdout)."""
    server().run()


def server() -> Any:
    """A `mcp.server.mcpserver.MCPServer` with the tools. Raises MissingDependencyError without the SDK."""
    require("mcp", "parsim mcp")
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    served = MCPServer("parsim", instructions=INSTRUCTIONS, log_level="WARNING")
    for tool in TOOLS:
        served.add_tool(_errors_told(tool, ToolError))
    return served


def _errors_told(tool: Callable[..., dict[str, Any]], told: type[Exception]) -> Callable[..., dict[str, Any]]:
    """The tool, whose errors of the user reach the agent: the SDK keeps the text of all other exceptions to itself."""

    @functools.wraps(tool)
    def answered(*arguments: Any, **named: Any) -> dict[str, Any]:
        try:
            return tool(*arguments, **named)
        except ParsimError as error:
            raise told(str(error)) from error

    return answered


def _asked(model: str, cluster: str, global_batch: int, network: str | None, settings: GivenKeys | None) -> Answer:
    return parsim.plan(_no_code(model), cluster=cluster, global_batch=global_batch, settings=_settings(network, settings))


def _settings(network: str | None, settings: GivenKeys | None) -> GivenKeys:
    return {**({} if network is None else {"cluster.network": network}), **(settings or {})}


def _no_code(model: str) -> str:
    if ":" in model:
        fix = "save it as a Model (parsim.trace), and give its path"
        raise ConfigError(f"model = {model!r} names code, which an agent may not run; {fix}")
    return model


def _figures(answer: Answer) -> dict[str, Any]:
    """The chosen plan, or the fastest where none fits."""
    prediction = answer.prediction
    document: dict[str, Any] = finite(
        {
            "fits": answer.fits,
            "fit_probability": prediction.fit_probability,
            "plan": prediction.plan.summary(),
            "step_s": prediction.step_s.to_dict(),
            "samples_per_s": prediction.throughput_samples_per_s.median,
            "peak_memory_bytes": max(prediction.peak_memory_bytes),
            "memory_limit_bytes": prediction.evaluation.memory[0].limit_bytes,
            "figures": None if prediction.quoted is None else prediction.quoted.to_dict(),
            "assumed": answer.assumed,
            "warnings": list(prediction.warnings),
        }
    )
    return document
