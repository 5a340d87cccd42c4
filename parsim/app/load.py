"""From a Question to the scheduler's question: the PlanningProblem, and the plans that the [plan] table allows."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parsim.app.calibration import calibration_request, device_here, local_batches, measure_machine
from parsim.app.config import THIS_MACHINE, MeshTable, Question, check_axes, constraints_of, mesh_of
from parsim.app.doctor import warn
from parsim.app.sections import MOST_STEP_TOKENS, ClusterSection
from parsim.costs.history import history_path, read_history
from parsim.costs.loading import UnmeasuredLoading
from parsim.costs.published import NOTHING_LEARNT, UNKNOWN, Learnt, PublishedRun, learnt_of
from parsim.data import DATASETS
from parsim.errors import ConfigError, MissingDependencyError, PlanError, ProfileError
from parsim.execute.job import with_update_groups
from parsim.execute.processes.machine import describe_environment, differences_from_here, gpu_names
from parsim.files import cache_folder, parse_json, read_text
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import NodeGroup, load_profile, mixed_cluster
from parsim.hardware.parts import load_gpu, load_network, with_cards
from parsim.hardware.profile import HostMemory, Profile, SourceEntry
from parsim.model.catalogue.frameworks import convolutions, hosted, run_by
from parsim.model.catalogue.names import is_transformer, shape_of
from parsim.model.catalogue.transformer import BALANCED
from parsim.model.divided import ExpertRouting
from parsim.model.formats import Numerics, recorded_weights
from parsim.model.load import load_model
from parsim.model.model import SUBLAYER, Model, all_layers_of
from parsim.model.tuning import check_storage
from parsim.plans.constraints import check_groups_fill
from parsim.plans.mesh import check_mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import AUTO, DEFAULT_BUCKET_BYTES, NONE, SWITCHES, Plan, check_plan
from parsim.plans.stages import counted_out
from parsim.predict.breakdown import tokens_per_sample
from parsim.predict.memory import FIT_PROBABILITY, SAFE_PROBABILITY, Scored
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import (
    custom_plan,
    forbids_by_pattern,
    framework_switches,
    offload_by_pattern,
    parse_placements,
    pins_by_pattern,
    placements_by_pattern,
    recompute_by_pattern,
)
from parsim.search.relaxed import relaxed_search
from parsim.search.search import Search, search
from parsim.search.tensor import partly_cut

GIVEN = "run file"
"""The source of numbers that a run file gives in place of the profile's."""


def problem_of(config: Question, *, model: Model | None = None, cluster: Cluster | None = None) -> PlanningProblem:
    """Load the model and the profile that the question names, or take the values that it was made from.

    Raises: ModelError, ProfileError; ConfigError for patterns, pins, forbids and tokens that the model does not have;
        PlanError for a mesh that the devices do not make.
    """
    plan, training = config.plan, config.training
    cluster = with_launches(cluster or config.source.cluster or cluster_of(config.cluster), config)
    for device in {device.type.name: device.type for device in cluster.devices}.values():
        check_storage(training.tune, device)
    model = as_software_runs(model or config.source.model or model_of(config), config)
    model = with_update_groups(with_routing(model, routing_of(config)), training.recipe.update_groups)
    if training.tokens is not None and not tokens_per_sample(model):
        raise ConfigError(
            f"training.tokens = {training.tokens:g}: {model.name} is not a language model, so its samples have no tokens; "
            "give training.samples (--samples N), the samples of all epochs together"
        )
    _check_step_tokens(model, training.global_batch)
    if plan.mesh is not None:
        check_axes(plan.mesh, cluster.size, by_hand=plan.strategy == "custom")
        if (plan.mesh.tp or 1) > 1 and not plan.placements and not is_transformer(config.model.name):
            model = replace(model, assumptions=(*model.assumptions, *partly_cut(model, plan.mesh.tp or 1)))
    check_groups_fill(plan.dp_shard, cluster.size)
    if plan.stage_layers is not None and sum(plan.stage_layers) != (layers := len(all_layers_of(model))):
        raise ConfigError(
            f"plan.stage_layers puts {sum(plan.stage_layers)} layers into stages, and {model.name} has {layers}; change numbers"
        )
    model = replace(model, assumptions=(*model.assumptions, *_cut_by_cost(config, model)))
    pins = pins_by_pattern(parse_placements(plan.pin), model, cluster.size)
    named, by_hand = config.software.row, plan.strategy == "custom"
    zero_stage = named.zero if named is not None and by_hand and plan.zero_stage == AUTO else plan.zero_stage
    framework = config.priced_software.row
    stated = {key: value for key in SWITCHES if (value := getattr(plan, key)) is not None}
    switches = {} if framework is None else framework_switches(framework)
    if stated.get("tensor_overlap") or stated.get("tensor_backward_overlap"):  # two ways to hide the same communication
        switches |= {"tensor_overlap": False, "tensor_backward_overlap": False}
    scored: Scored = "averages" if training.ema is not None and training.ema.evaluate else "weights"
    return PlanningProblem(
        model=model,
        cluster=cluster,
        global_batch=training.global_batch,
        numerics=numerics_of(config),
        update_calls=2 if training.no_weight_decay else 1,
        scored="" if training.evaluation is None else scored,
        clip_gradients=training.clip_norm is not None or (framework is not None and framework.clip),
        switches=tuple({**switches, **stated}.items()),
        learnt=_learnt_of(config, cluster.size),
        loading=UnmeasuredLoading(reason="nothing was read") if DATASETS[training.dataset].is_own else None,
        history=read_history(history_path(config.cluster.profile or "", config.cluster.history), cluster.profile),
        fit_probability=plan.fit_probability or FIT_PROBABILITY,
        safe_probability=plan.fit_probability or SAFE_PROBABILITY,
        zero_stage=zero_stage,
        recompute=recompute_by_pattern(plan.recompute, model),
        inner_axes=is_transformer(config.model.name) and plan.strategy != "custom",
        segments=is_transformer(config.model.name) and model.granularity == SUBLAYER and not plan.activation_offload,
        optimizer_offload=plan.optimizer_offload or False,
        activation_offload=offload_by_pattern(plan.activation_offload or False, model),
        constraints=constraints_of(config),
        pins=pins,
        routing=routing_of(config),
        forbids=forbids_by_pattern(plan.forbid, model, pins),
    )


def _check_step_tokens(model: Model, global_batch: int) -> None:
    """Refuse a batch that counts tokens where it should count samples. Raises ConfigError."""
    sample = tokens_per_sample(model)
    step = global_batch * sample
    if step > MOST_STEP_TOKENS:
        raise ConfigError(
            f"training.global_batch = {global_batch} samples of {sample} tokens: {step:.3g} tokens per step, must be <= "
            f"{MOST_STEP_TOKENS}; it counts samples, so for {global_batch} tokens give --batch {max(1, global_batch // sample)}"
        )


def _cut_by_cost(config: Question, model: Model) -> tuple[str, ...]:
    """What is assumed of stages that are asked for, and into which the framework cuts no model by itself."""
    plan, framework = config.plan, config.software.row
    stages = ((plan.mesh or MeshTable()).pp or 1) * (plan.chunks or 1)
    if framework is None or not framework.cut or plan.stage_layers is not None or stages == 1:
        return ()
    layers = len(all_layers_of(model))
    if counted_out(framework.cut, layers, stages) is not None:
        return ()
    return (f"{framework.name} does not cut {layers} layers evenly into {stages} stages: cut by cost (plan.stage_layers)",)


HALVES = dict.fromkeys(("fp16", "amp_fp16", "amp_bf16"), "bf16")
"""Precisions whose products take as long as those in bf16."""


def _learnt_of(config: Question, gpus: int) -> Learnt:
    """What published runs say of the question; with a framework that is guessed, as with none."""
    framework = config.software.row
    if not config.is_judged:
        return NOTHING_LEARNT
    gpu = load_gpu(str(config.cluster.gpu)).name
    shape = shape_of(config.model.name, dict(config.model.args))
    precision = config.training.precision
    return learnt_of(
        PublishedRun(
            gpu=gpu,
            precision=HALVES.get(precision, precision),
            framework=UNKNOWN if framework is None else framework.name,
            until=0 if framework is None else framework.until,
            experts=bool(shape.experts),
            encoder=not shape.causal,
            gpus=gpus,
        )
    )


def with_launches(cluster: Cluster, config: Question) -> Cluster:
    """The cluster whose hosts launch kernels, and work between steps, as the software has it.

    Raises ConfigError for CUDA graphs on a cluster of which no time of the host per launch is known.
    """
    host, software = cluster.profile.host, config.priced_software
    if host is not None and host.launch_s:
        gathers = config.training.tune is None and config.plan.zero_stage in (AUTO, 3)
        launches = software.launches_on(config.cluster.gpu or "", gathers=gathers)
        return hosted(cluster, launches=launches, step_s=0.0 if software.row is None else software.row.step_s)
    if software.cuda_graphs:
        raise ConfigError(
            "software.cuda_graphs = true takes away what the host takes for each kernel, which "
            f"{cluster.profile.name} does not say apart; drop it, or name GPUs that do (h100-sxm, b200)"
        )
    return cluster


def with_routing(model: Model, routing: ExpertRouting) -> Model:
    """The Model, whose assumptions say what is taken of the way of tokens to experts where it is not the simplest."""
    if BALANCED not in model.assumptions:
        return model
    kept = [BALANCED]
    if routing.skew:
        kept = [f"visits of single experts have a standard deviation of {routing.skew:g} of their mean"]
    if routing.dispatcher != ExpertRouting().dispatcher or routing.overlapped:
        beside = ", beside the computation of another microbatch" if routing.overlapped else ""
        kept.append(f"tokens reach experts by {routing.dispatcher}{beside}")
    return replace(model, assumptions=(*(each for each in model.assumptions if each != BALANCED), *kept))


def routing_of(config: Question) -> ExpertRouting:
    """How tokens reach experts: as [plan] and [software] say, and where they do not, as the framework has it."""
    return replace(
        config.priced_software.routing, capacity_factor=config.plan.capacity_factor or 0.0, skew=config.plan.routing_skew or 0.0
    )


def numerics_of(config: Question) -> Numerics:
    """The numbers of [training], with gradients as the framework keeps them where the question does not say."""
    numerics, framework = config.training.numerics, config.priced_software.row
    if framework is None or not framework.full_gradients or numerics.gradient_dtype or not numerics.is_half:
        return numerics
    return replace(numerics, gradient_dtype="fp32")


def as_software_runs(model: Model, config: Question) -> Model:
    """The Model with the launches that [software] has for its convolutions.

    Raises ConfigError for a Model without any, of which the table says nothing.
    """
    software = config.software.convolution
    if software is None or is_transformer(config.model.name):
        return model
    if not convolutions(model):
        key = "framework" if config.software.framework else "channels_last"
        raise ConfigError(
            f"software.{key} = {getattr(config.software, key)!r} is of convolutions or of transformers by name (llama3-8b); "
            f"{model.name} is neither, and its operators are those that were traced; drop it"
        )
    return run_by(model, software, config.training.precision)


def cluster_of(table: ClusterSection, profile: Profile | None = None) -> Cluster:
    """The cluster of [cluster], on its own profile or on the one given. Raises ProfileError."""
    devices = list(table.devices) if isinstance(table.devices, tuple) else table.devices
    profile = with_host_memory(load_profile(table.machine), table) if profile is None and table.group is None else profile
    network = None if (between := table.between) is None else load_network(between)
    if network is not None and table.cards_per_node is not None:
        network = with_cards(network, table.cards_per_node)
    if table.group is not None:
        groups = [NodeGroup(**dict(group)) for group in table.group]
        mixed = mixed_cluster(groups, network, devices=devices, link=table.link, profile=profile)
        return replace(mixed, profile=with_host_memory(mixed.profile, table))
    assert profile is not None
    return cluster_from_profile(profile, devices, nodes=table.nodes, network=network)


def with_host_memory(profile: Profile, table: ClusterSection) -> Profile:
    """The profile with what the run file says of the host's memory; the same one where it says nothing."""
    values = {
        "memory_bytes": table.host_memory_bytes,
        "bandwidth_bytes_per_s": table.host_memory_bandwidth_bytes_per_s,
        "link_bytes_per_s": table.host_link_bytes_per_s,
    }
    values = {key: value for key, value in values.items() if value is not None}
    if not values:
        return profile
    measured = {} if profile.host_memory is None else profile.host_memory.model_dump(exclude={"source"})
    host = HostMemory(**{**measured, **values, "source": GIVEN})
    sources = {**profile.sources, GIVEN: SourceEntry(kind="assumption", text="[cluster] of the run file")}
    return profile.model_copy(update={"host_memory": host, "sources": sources})


def model_of(config: Question) -> Model:
    """The Model of [model]; a JSON that Model.save wrote is read as it is, without torch.

    Raises: ModelError: an unknown or broken model. ConfigError: arguments for a model that is read from a file.
    """
    path = Path(config.model.name)
    if path.suffix != ".json" or not is_saved_model(path):
        weights = recorded_weights(config.training.precision)
        granularity, sharded = config.model.granularity, not config.plan.is_uncut
        return load_model(config.model_spec, granularity=granularity, weights=weights, sharded=sharded)
    described = ("input_shape", "loss", "inputs", "output", "classes_dim", "target", "control_flow")
    fields = type(config.model).model_fields
    if config.model.args or any(getattr(config.model, key) != fields[key].default for key in described):
        raise ConfigError(
            f"{path} holds a finished Model: model.args, model.input_shape and model.loss cannot change it (nor can "
            "inputs, output, classes_dim, target and control_flow); drop them"
        )
    check_untuned(config)
    model = Model.load(path)
    if config.model.granularity not in ("block", model.granularity):
        raise ConfigError(
            f"{path} holds a finished Model of granularity {model.granularity}: model.granularity = "
            f"{config.model.granularity!r} cannot change it; drop it"
        )
    return model


def check_untuned(config: Question) -> None:
    """Raise ConfigError where a finished Model is to be fine-tuned: adapters are put into a module before it is recorded."""
    if config.training.tune is not None:
        raise ConfigError(
            f"training.tune: {config.model.name} is a finished Model, whose trained parameters stand in it; name the model "
            "(llama3-8b), a config.json or package.module:factory, or drop training.tune"
        )


def is_saved_model(path: Path) -> bool:
    """True for a file of Model.save, false for a Hugging Face config."""
    try:
        document = parse_json(read_text(path))
    except (OSError, ValueError):  # whoever reads it next says what is wrong with it
        return False
    return isinstance(document, dict) and "components" in document


def fixed_plan(problem: PlanningProblem, config: Question) -> Plan | None:
    """The plan of strategy "custom" or of a plan file; None where plans are searched for.

    Raises: PlanError: the plan contradicts the model, the batch or the cluster. ConfigError: so does a pattern of placements.
    """
    table = config.plan
    if table.plan_path is not None:
        plan = Plan.load(table.plan_path)
        check_plan(plan, problem.model)
        plan = replace(plan, clip_gradients=problem.clip_gradients)
        if plan.global_batch != problem.global_batch:
            raise PlanError(
                f"{table.plan_path} is for global_batch {plan.global_batch}, the run file asks for {problem.global_batch}; "
                f"set training.global_batch = {plan.global_batch} or plan again"
            )
        return plan
    if table.strategy != "custom" or table.mesh is None:
        return None

    mesh = mesh_of(table)
    order = table.pipeline_order or "1f1b"
    check_mesh(mesh, problem.cluster.size)
    framework = config.software.row
    unstated = NONE if framework is None else framework.recompute
    return custom_plan(
        problem,
        mesh,
        placements=placements_by_pattern(parse_placements(table.placements), problem.model) if table.placements else None,
        microbatches=table.microbatches or 1,
        pipeline_order=order,
        chunks=table.chunks or PIPELINE_ORDERS[order].fewest_chunks,
        bucket_bytes=table.bucket_bytes or DEFAULT_BUCKET_BYTES,
        recompute=unstated if problem.recompute == AUTO else problem.recompute,
        context_exchange=table.context_exchange or "ring",
        synchronisation=table.relaxed,
    )


def search_plans(
    problem: PlanningProblem, config: Question, *, top: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Search:
    """Search the family that [plan] names. Raises ScheduleError, CostError."""
    if problem.constraints.synchronisation.is_relaxed:
        return relaxed_search(problem, (config.plan.strategy,), top=top)
    return search(problem, (config.plan.strategy,), top=top, say=say)


# cluster = "this-machine": the calibrated profile of this machine, found in the cache or made quickly.
#
# Profiles lie in `$PARSIM_HOME/profiles`, or without that variable in `$XDG_CACHE_HOME/parsim/profiles` or
# `~/.cache/parsim/profiles`. A profile serves a question under two conditions. It was measured on this processor (or these
# GPUs), with as many cores, this version of torch and the same priority for communication. And it holds the question's
# model at its local batches, and its optimizer. The newest that serves is taken. Otherwise the question's model is
# calibrated quickly, in about a minute.


def profiles_folder() -> Path:
    """Where profiles of this machine are kept."""
    return cache_folder("profiles")


def on_this_machine(config: Question) -> Question:
    """The question with `cluster.profile = "this-machine"` replaced by the path of the profile; another profile stays.

    Raises: ConfigError: nodes > 1, or a Model given as a value that no kept profile has measured. MissingDependencyError:
        without torch. ProfileError, ExecutionError: the calibration failed.
    """
    if config.cluster.profile != THIS_MACHINE:
        return config
    if config.cluster.nodes > 1:
        raise ConfigError(f"cluster.nodes = {config.cluster.nodes}: {THIS_MACHINE} is one machine; set cluster.nodes = 1")
    path = _kept_profile(config)
    if path is None:
        path = cache_path(config)
        if importlib.util.find_spec("torch") is None:
            raise MissingDependencyError(
                f"{THIS_MACHINE} needs a calibration, and that needs torch, which is not installed; pip install "
                "'parsim[torch]', or name a shipped profile"
            )
        if config.source.model is not None:
            raise ConfigError(
                f"{config.model.name} was given as a value, and no profile in {path.parent} has measured it. A calibration "
                'builds the model in every process; give "package.module:function" as the model, or the path of a profile as '
                "the cluster"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        measure_machine(calibration_request([config], device=device_here(), quick=True), path)
    print(f"{THIS_MACHINE}: {path}", file=sys.stderr, flush=True)
    return config.changed(cluster=config.cluster.model_copy(update={"profile": str(path)}))


def cache_path(config: Question) -> Path:
    """Where a calibration for this question is kept: the name stands for the machine, torch, the model, batch and optimizer."""
    environment, device = describe_environment(), device_here()
    key = (
        environment["processor"],
        environment["cores"],
        environment["communication_priority"],
        environment["versions"].get("torch"),
        gpu_names() if device == "cuda" else device,
        config.model_spec.to_dict(),
        config.model.granularity,
        config.training.global_batch,
        *config.training.optimizers,
        config.training.precision if device == "cuda" else "fp32",
        config.cluster.devices,
    )
    return profiles_folder() / f"{THIS_MACHINE}-{hashlib.sha256(repr(key).encode()).hexdigest()[:8]}.json"


def _kept_profile(config: Question) -> Path | None:
    """The newest profile in the cache that serves the question; one that is broken is named on stderr."""
    model = config.source.model
    made_for_it = cache_path(config) if model is None else None
    for path in sorted(profiles_folder().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            profile = load_profile(str(path))
        except ProfileError as error:
            warn(error)
            continue
        if profile.device_types[profile.devices[0].type].kind != device_here() or differences_from_here(profile):
            continue
        model = model or model_of(config)
        if path == made_for_it or serves(profile, config, model):
            return path
    return None


def serves(profile: Profile, config: Question, model: Model) -> bool:
    """Whether the profile has measured what the question's plans compute, on as many devices as it asks for."""
    devices = config.devices
    if len(profile.devices) < (len(devices) if isinstance(devices, list) else devices or 0):
        return False
    if not {point.optimizer for point in profile.compute.optimizers}.issuperset(config.training.optimizers):
        return False
    samples: dict[str, set[int]] = {}
    precision = config.training.precision if device_here() == "cuda" else "fp32"
    for point in profile.compute.components:
        if point.precision == precision:
            samples.setdefault(point.fingerprint, set()).add(point.samples)
    batches = local_batches(config.training.global_batch)
    return all(
        (measured := samples.get(component.fingerprint)) is not None
        and min(measured) <= min(batches)
        and max(measured) >= max(batches)
        for component in model.components
    )
