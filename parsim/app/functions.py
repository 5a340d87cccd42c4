"""The public functions of `import parsim`: the same work as the commands, with data as the result.

Every function that asks a question takes a model, a cluster, a global batch and any key of a run file by its name: `precision`,
`strategy`, `zero_stage`, ... (docs/run-file.md). The run file's own record checks them.

Progress goes to stderr. Every error a user can cause is a `parsim.ParsimError` that says the rule, the value and the fix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from parsim.app.answer import Answer
from parsim.app.ask import ask, check_options, simulate_prediction, whole
from parsim.app.calibration import Calibration, calibration_request, device_here, measure_machine
from parsim.app.check import Checked, check_question
from parsim.app.config import THIS_MACHINE, Granularity, LargestOf, Question, keys_by_name
from parsim.app.doctor import progress
from parsim.app.load import cache_path
from parsim.app.prediction import Prediction
from parsim.app.question import is_run_file, question_of
from parsim.errors import ConfigError, near_matches
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import is_shorthand, machines_of
from parsim.model.load import model_from_module
from parsim.model.model import Model

if TYPE_CHECKING:
    from torch import nn


AskedModel: TypeAlias = "str | Path | Model | nn.Module"
AskedCluster: TypeAlias = str | Path | Cluster | Calibration
KEYS = keys_by_name()
Asks = TypeVar("Asks", bound=Callable[..., Any])


def takes_keys(function: Asks) -> Asks:
    """A function whose signature lists every key of a run file in place of `**keys`, for help and completion."""
    signature = inspect.signature(function)
    named = {name: entry for name, entry in signature.parameters.items() if entry.kind is not inspect.Parameter.VAR_KEYWORD}
    for name in KEYS:
        named.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    function.__signature__ = signature.replace(parameters=list(named.values()))  # type: ignore[attr-defined]
    return function


@takes_keys
def plan(
    model: AskedModel,
    cluster: AskedCluster | None = None,
    *,
    global_batch: int | None = None,
    example_inputs: Any = None,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    top: int | None = None,
    largest: LargestOf | None = None,
    **keys: Any,
) -> Answer:
    """Search for the fastest plan to train a model on a cluster, and rank the best plan of each family.

    Args:
        model: a name ("resnet50", "llama3-70b"), "package.module:factory", the path of a Hugging Face config.json, of a saved
            Model or of a run file (which holds all other arguments); or a Model, or an nn.Module.
        cluster: a shipped profile by name, the path of one, "this-machine", a Cluster or a Calibration.
        global_batch: samples per step over all replicas; None: a usual one, which `assumed` names.
        example_inputs: of an nn.Module, instead of input_shape: a batch for its forward (a Tensor, a tuple, a dict by
            name); a tensor whose dim 0 differs from that of the first is constant.
        top: keep the `top` fastest plans over all strategies instead of the best of each.
        largest: "batch", "seq" or "model" (its layers): answer for the largest that fits with 95%; `Answer.largest` says what
            it costs in time.
        keys: any key of a run file by its name:
            precision: "fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8" or "nvfp4".
            optimizer: a row of docs/extending.md ("sgd_momentum", "adamw_fused"), or torch's name ("AdamW").
            strategy: "single", "dp", "mp", "hp", "adaptive" (all of these), or the path of a plan.json.
            devices: the first N of every node, or device numbers. nodes: copies of the cluster, connected by `network`.
            args: keyword arguments of the model. input_shape: of one sample, such as (3, 224, 224); tokens: (seq,).
            seq: tokens per sample of a language model. tokens, samples: of the whole training, for days, price and failures.
            mesh, zero_stage, microbatches, recompute, ...: what every plan must keep.
        settings: the same keys with their table, such as {"plan.zero_stage": 1}. overrides: the same as strings, in the form
            of `--set`.

    Returns:
        The ranked plans. `assumed` lists the defaults taken. If no plan fits, `fits` is False.

    Raises:
        ParsimError: ConfigError for a wrong or missing key, ModelError, ProfileError, PlanError, ScheduleError, CostError.

    >>> answer = plan("mlp", cluster="dgx1-v100-32gb", global_batch=1024, devices=4, strategy="dp")
    >>> answer.chosen.plan.summary()
    'dp pp=1 dp=4 tp=1 mb=1x256 zero3'
    >>> answer.assumed["training.precision"], answer.fits
    ('fp32', True)
    >>> list(answer.table().columns[:4])
    ['strategy', 'plan', 'chosen', 'step_s']
    """
    question = question_by_name(model, cluster, global_batch, settings, keys, overrides, example_inputs)
    if largest is None:
        return ask_aloud(question, top=top)
    from parsim.app.check import largest as find_largest

    with progress(f"Looking for the largest {largest} of {question.model.name} on {question.cluster.in_words}") as say:
        return find_largest(question, largest, say)


@takes_keys
def check(
    model: AskedModel,
    cluster: AskedCluster | None = None,
    *,
    global_batch: int | None = None,
    example_inputs: Any = None,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Checked:
    """Check a training before it is launched: whether it fits, how fast it is, and three changes that would help.

    Args: as for `plan`; a file that names a mesh is taken as it is.

    Returns:
        The prediction with its verdict: "fits" (with 95%), "uncertain" or "does not fit". `exit_status` is 0, 4 or 3.

    Raises:
        ParsimError: as `plan`.

    >>> checked = check("mlp", cluster="dgx1-v100-32gb", global_batch=1024, devices=4, strategy="dp")
    >>> checked.verdict, checked.exit_status, len(checked.helps) <= 3
    ('fits', 0, True)
    """
    question = question_by_name(model, cluster, global_batch, settings, keys, overrides, example_inputs)
    with progress(f"Checking {question.model.name} on {question.cluster.in_words}"):
        return check_question(question)


@takes_keys
def simulate(
    model: AskedModel | Answer | Prediction,
    cluster: AskedCluster | None = None,
    *,
    global_batch: int | None = None,
    engine: Literal["static", "dynamic"] = "static",
    scenario: str | Path | None = None,
    whole_run: bool = False,
    example_inputs: Any = None,
    settings: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Prediction:
    """Simulate one step of one plan, task by task: the best plan of a strategy, or the plan of an earlier answer.

    Args:
        model: as for `plan`; or an Answer (its chosen plan, or the fastest that does not fit) or a Prediction, without the
            arguments that make a question.
        cluster, global_batch, example_inputs, keys, settings, overrides: as for `plan`.
        engine: "static" (arrays) or "dynamic" (processes); both give the same timeline.
        scenario: path of a scenario.toml: stragglers, links, failures; needs engine="dynamic".
        whole_run: simulate to the end of training, by the scenario's table [run].

    Returns:
        The prediction, with every rank simulated up to 64 ranks and 500,000 tasks; a plan that does not fit has `fits` False.

    Raises:
        ParsimError: as `plan`; ScenarioError for a scenario that contradicts the plan or the cluster.

    >>> predicted = simulate("mlp", cluster="dgx1-v100-32gb", global_batch=1024, strategy="dp")
    >>> ranks = predicted.breakdown()
    >>> len(ranks), bool((ranks.compute_s < ranks.step_s).all())
    (8, True)
    """
    path = None if scenario is None else Path(scenario)
    check_options(engine, path, whole_run)
    if isinstance(model, Answer | Prediction):
        beside = {"cluster": cluster, "global_batch": global_batch, "settings": settings, "example_inputs": example_inputs}
        check_nothing_beside(model, overrides=overrides or None, **beside, **keys)
        prediction = model.prediction if isinstance(model, Answer) else model
    else:
        question = question_by_name(model, cluster, global_batch, settings, keys, overrides, example_inputs)
        prediction = whole(ask_aloud(question)).prediction
    with progress(f"Simulating {prediction.plan.summary()}"):
        return simulate_prediction(prediction, engine=engine, scenario=path, whole_run=whole_run)


def calibrate(
    model: str | Path,
    *,
    global_batch: int | None = None,
    optimizer: str | None = None,
    args: Mapping[str, object] | None = None,
    input_shape: Sequence[int] | None = None,
    granularity: Granularity | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    nproc: int | None = None,
    quick: bool = False,
    out: str | Path | None = None,
) -> Calibration:
    """Measure this machine: the components of a model, its optimizer, and collectives between the ranks.

    Args:
        model: by name as for `plan`, or a run file, which holds batch and optimizer.
        args, input_shape, granularity: of the model.
        global_batch: samples per step; the local batches of its plans are measured.
        device: "cpu" or "cuda"; default: "cuda" if torch sees a GPU. nproc: ranks; default: one per GPU or core.
        quick: fewer rounds and sizes, in about a minute instead of several.
        out: path of the profile; default: the cache of cluster="this-machine" ($PARSIM_HOME/profiles, or
            ~/.cache/parsim/profiles).

    A calibration that was stopped continues when it is called again with the same arguments.

    Raises:
        ParsimError: MissingDependencyError without torch; ConfigError, ProfileError, ExecutionError.
    """
    keys = {"optimizer": optimizer, "args": args, "input_shape": input_shape, "granularity": granularity}
    cluster = None if is_run_file(model) else THIS_MACHINE
    question = question_by_name(model, cluster, global_batch, None, keys)
    path = cache_path(question) if out is None else Path(out)
    if out is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    request = calibration_request([question], device=device or device_here(), nproc=nproc, quick=quick)
    return Calibration(path=path, profile=measure_machine(request, path))


def trace(
    module: nn.Module,
    example_inputs: Any = None,
    *,
    input_shape: Sequence[int] | None = None,
    granularity: Granularity = "block",
    loss: str | None = None,
    name: str | None = None,
    control_flow: Literal["refuse", "example"] = "refuse",
) -> Model:
    """Trace a torch module into components: a Model that can be planned, priced and saved as JSON.

    Args:
        example_inputs: a batch for the forward of the module; or input_shape, of one sample.
        control_flow: if the forward branches on values of tensors, refuse it with its line, or follow the example inputs and
            record that in `Model.assumptions`. Experts chosen by topk or argmax are always taken as balanced.
        granularity: "block", "sublayer" (halves of blocks, which can be sharded) or "layer".
        loss: "cross_entropy", "mse", "bce", "own" or "package:function", with `output`, `classes_dim` and `target` in brackets:
            "cross_entropy(classes_dim=0)"; default: by the output. name: of the Model.

    Raises:
        ParsimError: TraceError for a module that cannot be cut; MissingDependencyError without torch.
    """
    return model_from_module(
        module,
        example_inputs,
        input_shape=None if input_shape is None else tuple(input_shape),
        granularity=granularity,
        loss=loss,
        name=name,
        control_flow=control_flow,
    )


def load_cluster(
    profile: str | Path | Calibration,
    *,
    devices: int | Sequence[int] | None = None,
    nodes: int = 1,
    network: str | None = None,
) -> Cluster:
    """A cluster as a value: the devices and links of a profile, or of several copies of it.

    Args:
        profile: a shipped profile by name, the path of one, GPUs such as "1024xh100-sxm" or instances such as
            "2xp5.48xlarge". devices: the first N of every
            node, or device numbers.
        nodes: copies, connected by the network of this name (or path).

    Raises:
        ProfileError: an unknown profile or network, or devices that it lacks.

    >>> load_cluster("dgx1-v100-32gb", nodes=2, network="infiniband-100g").size
    16
    """
    if not isinstance(profile, Calibration) and is_shorthand(str(profile)):
        machines = machines_of(str(profile))
        profile, nodes = machines.node, machines.nodes * nodes
        if machines.instance is not None and network is None and nodes > 1:
            network = machines.instance.sizes.network
    loaded = profile.profile if isinstance(profile, Calibration) else load_profile(str(profile))
    return cluster_from_profile(loaded, devices, nodes=nodes, network=network)


OPTIONS = {"gpus": "cluster", "on": "cluster", "batch": "global_batch"}
"""Options of the command line that have other names as arguments."""


def question_by_name(
    model: AskedModel,
    cluster: AskedCluster | None,
    global_batch: int | None,
    settings: Mapping[str, object] | None,
    keys: Mapping[str, object],
    overrides: Sequence[str] = (),
    example_inputs: Any = None,
) -> Question:
    """The question that arguments make. Raises ConfigError for a key that is unknown, or given with and without its table."""
    by_path: dict[str, object] = {}
    for name, value in keys.items():
        if name not in KEYS:
            near = f"; write {OPTIONS[name]} = {value!r}" if name in OPTIONS else near_matches(name, KEYS)
            raise ConfigError(f"{name} = {value!r} is no argument and no key of a run file{near}")
        if value is not None:
            by_path[KEYS[name]] = value
    for key, value in (settings or {}).items():
        if key in by_path:
            raise ConfigError(f"settings[{key!r}] = {value!r}, but {key} = {by_path[key]!r} was given as an argument; drop one")
    return question_of(
        model,
        cluster=cluster.path if isinstance(cluster, Calibration) else cluster,
        global_batch=global_batch,
        settings=by_path | dict(settings or {}),
        overrides=overrides,
        example_inputs=example_inputs,
    )


def ask_aloud(question: Question, *, top: int | None = None, runs_here: bool = False) -> Answer:
    with progress(f"Planning {question.model.name} on {question.cluster.in_words}") as say:
        return ask(question, top=top, runs_here=runs_here, say=say)


def check_nothing_beside(result: Answer | Prediction, **arguments: object) -> None:
    beside = [name for name, value in arguments.items() if value is not None]
    if beside:
        raise ConfigError(
            f"{beside[0]} was given beside {'an Answer' if isinstance(result, Answer) else 'a Prediction'}, which says it "
            "itself; drop it, or plan again with it"
        )
