"""Attention, MLP, embedding and head of a transformer, each as a component.

Bytes saved per token follow Korthikanti et al. (2022), section 4. Leaves out: biases of norms in memory, rotary tables, the two
small sums of a vocabulary-parallel loss, router losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parsim.errors import ModelError
from parsim.model.component import (
    ALONE,
    BIAS,
    BIAS_GRADIENT,
    BY_EXPERT,
    FULL_BYTES,
    GRADIENT_SUM,
    NOT_LOW,
    PARTS,
    UNALIGNED,
    Component,
    DividedSize,
    Operator,
    OperatorShard,
    Parameter,
    ParameterShard,
    Selective,
    Sharding,
    Size,
    Value,
)
from parsim.model.tuning import HEAD, Tuning
from parsim.units import nearest_divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder-only or encoder-only transformer.

    Attributes:
        ffn: inside of the MLP; 0: 4 hidden. kv_heads: fewer than heads: grouped queries; 0: heads. head_dim: 0: hidden / heads.
        gated: SwiGLU with three products; else two and GELU. norm: "layer" or "rms". bias: of linear layers.
        qkv_bias: of queries, keys and values alone. qk_norm: a norm per head of queries and of keys.
        rotary: rotated queries and keys instead of learned positions. alibi: neither of both, but biases of scores.
        positions: learned ones; 0: as many as a sample has tokens. tied: the output matrix is the embedding.
        embedding_norm: a norm behind the embedding. sinks: a learned score per head.
        experts: of a mixture; active: that each token visits; expert_ffn: of one. shared_ffn: of experts that all tokens visit.
        expert_bias: of experts and router. dense_layers: first layers without experts.
        query_rank, key_rank, rope_dim: of multi-head latent attention; 0: none (queries straight from the stream).
        causal: a query sees no later key.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    norm: str = "layer"
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary: bool = False
    alibi: bool = False
    positions: int = 0
    tied: bool = True
    embedding_norm: bool = False
    sinks: bool = False
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    expert_bias: bool = False
    dense_layers: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rope_dim: int = 0
    causal: bool = True

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def weights(self) -> int:
        """Parameters without norms and biases."""
        width, rotated = self.heads * self.dim, self.heads * self.rope_dim
        attention = self.hidden * (width + 2 * self.keys * self.dim)
        if self.key_rank:
            queries = (self.query_rank or self.hidden) * (width + rotated) + self.hidden * self.query_rank
            attention = queries + self.hidden * (self.key_rank + self.rope_dim) + 2 * self.key_rank * width
        arms, dense = 3 if self.gated else 2, self.dense_layers if self.experts else self.layers
        mixture = self.hidden * (arms * (self.experts * self.expert_ffn + self.shared_ffn) + self.experts)
        layers = self.layers * (attention + width * self.hidden) + dense * arms * self.hidden * self.inner
        return layers + (self.layers - dense) * mixture + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def learned_positions(self) -> bool:
        return not (self.rotary or self.alibi)

    def check(self) -> None:
        """Raise ModelError, with the nearest sizes that go together, for those that do not."""
        for key in ("layers", "hidden", "heads", "vocab"):
            if getattr(self, key) < 1:
                raise ModelError(f"{self.name}: {key} must be >= 1, got {getattr(self, key)}")
        if not self.head_dim and self.hidden % self.heads:
            fitting = nearest_divisors(self.hidden, self.heads)
            raise ModelError(
                f"{self.name}: the heads ({self.heads}) must divide the hidden size ({self.hidden}); the nearest that do: "
                f"{fitting}; or give head_dim"
            )
        if self.heads % self.keys:
            raise ModelError(
                f"{self.name}: kv_heads ({self.kv_heads}) must divide the heads ({self.heads}); the nearest that do: "
                f"{nearest_divisors(self.heads, self.kv_heads)}"
            )
        if self.experts and not 1 <= self.active <= self.experts:
            raise ModelError(f"{self.name}: active = {self.active} experts per token must be 1 to experts = {self.experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a framework runs besides the products.

    Attributes:
        flash: attention is one kernel. dropout: after attention, after the two sublayers and inside attention.
        activation_arrays: moved by the kernels of a gated activation function per element of the MLP's inside, the gate apart.
        activation_saved: copies of the inside of a gated MLP that are kept. residual_arrays: moved by adding the residual.
        score_arrays: moved between the two products of unfused attention; 2 where scale, mask and softmax are one kernel.
        norm_arrays: moved by an RMS norm. selective: the inside of attention is computed again.
        modules: of `MODULES`, those that run again by operator; none: those of torch's policies.
        loss_bytes: kept per logit. loss_peak: of gradients per logit at the fullest moment.
        loss_arrays: of 2 bytes per logit that the loss moves in its forward.
        gradient_arrays: of 2 bytes per parameter that a microbatch moves to add its gradients to those of the ones before.
        aligned: channels of a head by a multiple of which unfused attention keeps its tensor cores; 0: by any number.
        attention_work: seconds of its flash attention over those of the kernel that parts know (FlashAttention-2, cuDNN).
        casts: inputs of products are cast to 8 bits, in both orders. cast_arrays: moved by it, one read and a half per order; 0
            where the kernel before writes both in place of one in 16 bits.
        early_stop: a second forward ends once the backward has all that it reads, so the last product of a layer does not run
            again: torch's checkpoint without reentry, from torch 2.1 on (`torch.utils.checkpoint.set_checkpoint_early_stop`).
        bias_kernels: gradients of biases are sums of their own, the bias of queries, keys and values is added by a kernel of
            its own, and the gradients of the three are copied together. Newer libraries do the first two in the product.
        adapter_arrays: moved per output of a product with an adapter, to scale what the adapter makes and to add it. One kernel
            moves 3; operation by operation it is 5 (peft/tuners/lora/layer.py: `result + lora_B(lora_A(x)) * scaling`).
        permutation_arrays: moved per visit of an expert and channel, to sort tokens by expert and to add up what comes back.
            Fused, both read and write once.
        expert_bias_arrays: moved per visit and channel, to add the bias of an expert's second product; 0: the product adds it.
    """

    flash: bool = False
    dropout: bool = True
    residual_arrays: float = 3.5
    activation_arrays: float = 2.0
    activation_saved: float = 2.0
    rope_arrays: float = 2.0
    norm_arrays: float = 2.0
    score_arrays: float = 2.0
    attention_work: float = 1.0
    casts: bool = False
    cast_arrays: float = 2.0
    selective: bool = False
    modules: tuple[str, ...] = ()
    loss_bytes: int = 6
    loss_peak: float = 4
    loss_arrays: float = 8.0
    gradient_arrays: float = 0.0
    aligned: int = 0
    early_stop: bool = False
    bias_kernels: bool = False
    permutation_arrays: float = 4.0
    expert_bias_arrays: float = 0.0
    adapter_arrays: float = 3.0


MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "rope")
"""What runs again by operator, as Megatron-Core's recompute_modules call it (megatron/core/transformer/transformer_config.py);
"moe_act" is the activation function of any MLP here, and "rope" rotates queries and keys."""
RECOMPUTED_BY_TORCH = frozenset({"layernorm", "moe_act", "rope"})
"""Policies of torch keep the outputs of products and of attention, and make the rest again."""

LOSSES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "fused": {"loss_bytes": 2, "loss_peak": 0, "loss_arrays": 3.0},
    "chunked": {"loss_bytes": 0, "loss_peak": 10 / 8, "loss_arrays": 3.0},
}
"""How a loss passes over the logits, bytes of one that stays in 16 bits; "": as the framework has it.

fused: read twice and overwritten by their gradient (transformer_engine/pytorch/cross_entropy.py; cross_entropy_loss_fusion with
cross_entropy_fusion_impl = te). chunked: eight parts, of which one is there with its gradient (torchtune's
LinearCrossEntropyLoss and Liger's FusedLinearCrossEntropy, which makes the gradients in the forward)."""


UNFUSED = Software(flash=False, dropout=True, bias_kernels=True, loss_arrays=10.4)
"""Megatron-LM before flash attention: fused scale, mask and softmax; fused bias, dropout and addition; fused GELU.

Biases: `output = output + bias` and `grad_output.sum(dim=0)` beside the products (NVIDIA/Megatron-LM megatron/mpu/layers.py
@02bb1f5c86fc). Loss: megatron/mpu/cross_entropy.py @34ed99d1f09d moves 38 bytes of a logit forward (cast to fp32 6, maximum
4, difference 8, exp 8, sum 4, quotient 8) and 14 backward (product 8, cast 6). That is 26 arrays of 2 bytes; the backward is
priced at 1.5 times the forward.
"""

TORCH_SOFTMAX_ARRAYS = 16.4
"""`score_arrays` where Megatron's fused softmax does not run: heads times samples of a rank are no multiple of 4, or there are
more than 2048 keys. Scale, mask and softmax then run in fp32 (forward_torch_softmax, bigscience-workshop/Megatron-DeepSpeed
megatron/model/fused_softmax.py @038bddcb6dfb): cast 6 bytes of a score, scale 8, mask 9, softmax 12, cast 6, and as many
backward; 82 bytes by 2 bytes and 2.5."""
FUSED_SOFTMAX_BATCH = 4
FUSED_SOFTMAX_KEYS = 2048


def softmax_is_fused(heads: int, keys: int) -> bool:
    """Whether Megatron's kernel for scale, mask and softmax runs.
    `heads`: of all samples of a microbatch on one rank; `keys`: that a query attends to."""
    return heads % FUSED_SOFTMAX_BATCH == 0 and keys <= FUSED_SOFTMAX_KEYS


UNFUSED_PERMUTATION = 7.0
"""`permutation_arrays` of single operations: a gather (2), a product with the router's weights (2), and a sum into the
stream (3) (NVIDIA/Megatron-LM megatron/core/transformer/moe/moe_utils.py @00611e6eeb0b, permute and unpermute)."""

EAGER = Software(
    flash=True,
    dropout=False,
    residual_arrays=3.0,
    loss_bytes=6,
    loss_arrays=10.0,
    permutation_arrays=UNFUSED_PERMUTATION,
    adapter_arrays=5.0,
)
"""Eager PyTorch with flash attention: nothing else is fused."""

EAGER_LLAMA = replace(EAGER, rope_arrays=10.0, norm_arrays=18.0, activation_arrays=4.0, activation_saved=3.0)
"""Eager Llama: rotation and RMSNorm in fp32, operation by operation (bytes of each pass added up)."""

COMPILED = Software(flash=True, dropout=False, residual_arrays=2.0, rope_arrays=2.0, activation_saved=2.0, loss_bytes=6)
"""torch.compile, or the fused kernels of Transformer Engine."""


# Operators of a transformer layer, and how tensor parallelism divides them. Sizes are of one sample.
#
# As in traced Models, operators count four bytes per element; the precision decides what is moved.


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """The tokens that a rank sees of a sample.

    Attributes:
        tokens: of a sample. context: keys that attention sees, which divides the tokens: of several documents each token
            sees its own. element_bytes: of an activation and of a parameter.
        loss_tokens: of a sample, those of which there are logits and a loss; 0: all.
    """

    tokens: int
    context: int
    element_bytes: int = 2
    loss_tokens: int = 0

    def operand_bytes(self, software: Software) -> int:
        """Bytes per element of an input of a product that is kept for the backward."""
        return 1 if software.casts else self.element_bytes


@dataclass
class Amount:
    """Bytes that every shard has whole, and those it has its share of."""

    whole: int = 0
    divided: int = 0

    @property
    def total(self) -> int:
        return self.whole + self.divided

    def add(self, size: int, *, divided: bool) -> None:
        if divided:
            self.divided += size
        else:
            self.whole += size

    def less(self, other: Amount) -> Amount:
        return Amount(self.whole - other.whole, self.divided - other.divided)


@dataclass
class Layer:
    """What a component under construction does.

    Attributes:
        prefix: of its parameters' names. shape, software, part: of the model, and the tokens that a rank sees. tuning: what is
            trained of it; None: everything.
        saved: bytes per sample kept for the backward; given: of them, what lies in the storage of the component's input.
        again: of the saved ones, what runs again where the component is recomputed by operator; by the operators `repeated`.
        peak, peak_fixed: bytes of gradients at the fullest moment of the backward, per sample and whatever the samples.
    """

    prefix: str
    shape: Shape
    software: Software
    part: SamplePart
    tuning: Tuning | None = None
    operators: list[Operator] = field(default_factory=list)
    cut: list[OperatorShard] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    cut_parameters: list[ParameterShard] = field(default_factory=list)
    saved: Amount = field(default_factory=Amount)
    given: Amount = field(default_factory=Amount)
    again: Amount = field(default_factory=Amount)
    repeated: list[int] = field(default_factory=list)
    peak: Amount = field(default_factory=Amount)
    peak_fixed: Amount = field(default_factory=Amount)

    def another(self, prefix: str = "h") -> Layer:
        """An empty component of the same model."""
        return Layer(prefix, self.shape, self.software, self.part, self.tuning)

    def add(self, operator: Operator, dim: str = "", divided_bytes: int = 0) -> None:
        """One more operator; `dim` is what a shard has a part of, `divided_bytes` the activations it divides."""
        if dim:
            self.cut.append(OperatorShard(number=len(self.operators), dim=dim, activation_bytes=divided_bytes))
        self.operators.append(operator)

    @property
    def frozen(self) -> bool:
        """Whether its own parameters are not trained, adapters apart."""
        return self.tuning is not None and self.tuning.method != "full"

    @property
    def reached(self) -> bool:
        """Whether a gradient comes back through it."""
        return not self.frozen or (self.tuning is not None and self.tuning.has_adapters)

    def adapted(self, name: str) -> tuple[str, ...]:
        """The parts of a product that have adapters; "up" stands for both arms of a gated MLP, "qkv" for the three."""
        if self.tuning is None or not self.tuning.has_adapters:
            return ()
        last = name.rpartition(".")[2] or HEAD
        if last in ("up", "qkv"):
            both = {"up": ("gate", "up") if self.shape.gated else ("up",), "qkv": ("q", "k", "v")}[last]
            fused = {"up": "gate_up", "qkv": "qkv"}[last]
            return (fused,) if fused in self.tuning.parts else tuple(part for part in both if part in self.tuning.parts)
        parts = {"proj": "o", "down": "down", HEAD: HEAD, "q_down": "q", "q_up": "q", "kv_down": "k", "kv_up": "v"}
        return (last,) if parts.get(last) in self.tuning.parts else ()

    def input_bytes(self, *names: str) -> int:
        """Bytes per element that are kept of what these products read: for the gradient of a weight, or of an adapter.
        An adapter computes in 16 bits beside a product in 8. With dropout it keeps a copy of its own (`_adapter`)."""
        if not self.frozen:
            return self.part.operand_bytes(self.software)
        trained = self.tuning is not None and self.tuning.method == HEAD and "" in names
        adapted = any(map(self.adapted, names)) and not (self.tuning and self.tuning.dropout)
        return self.part.element_bytes if trained or adapted else 0

    @property
    def input_alone(self) -> str:
        """What the backward of an operator computes whose parameters are frozen (`Operator.gradients`)."""
        return "input" if self.reached else "none"

    def weight(self, name: str, elements: int, dim: int | None = None, *, trainable: bool | None = None) -> None:
        """A parameter, cut along `dim` (None: whole on every shard); trained unless the model is frozen, if nothing is said."""
        full = f"{self.prefix}.{name}"
        trainable = not self.frozen if trainable is None else trainable
        width = self.part.element_bytes
        self.parameters.append(Parameter(name=full, elements=elements, element_bytes=width, trainable=trainable))
        if dim is not None:
            self.cut_parameters.append(ParameterShard(name=full, dim=dim))

    def repeat(self, module: str, numbers: Iterable[int], size: int = 0, *, divided: bool) -> None:
        """By operator, these operators of a module run again, and so many bytes of what is kept are made by them."""
        software = self.software
        chosen = software.modules or (RECOMPUTED_BY_TORCH if software.flash else ("core_attn",))
        if module in chosen:
            self.repeated += numbers
            self.again.add(size, divided=divided)

    def since(self, begin: int) -> range:
        """The operators from number `begin` on."""
        return range(begin, len(self.operators))

    def stop_early(self) -> None:
        """Everything up to the last product runs again, and makes all that is kept beside the component's input.
        Leaves out: nothing of the memory. The last product saves its input before it runs, and its result is not kept."""
        last = max(number for number, operator in enumerate(self.operators) if operator.kind == "matmul")
        self.repeated = list(range(last))
        self.again = self.saved.less(self.given)

    def linear(
        self,
        name: str,
        rows: int,
        outputs: int,
        inputs: int,
        *,
        split: str,
        bias: bool = False,
        problems: int = 1,
        added: str = BIAS_GRADIENT,
        low: bool = True,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        """A product with a weight, and its adapters: split "column" (its outputs), "row" (its inputs) or "" (whole on every
        shard).

        `problems`: of so many experts, each with its own weight and `rows` rows. `added`: as `bias_kernel` has it; with "row"
        the residual's kernel adds the bias. `low`: training in 8 or 4 bits multiplies in them. `widths`: outputs of the parts
        that may have adapters of their own (`adapted`); None: all of them have all.
        """
        trained = not self.frozen or (not name and self.tuning is not None and self.tuning.method == HEAD)
        self._product(
            f"{name}.weight" if name else "weight",
            *(rows, outputs, inputs),
            split=split,
            problems=problems,
            low=low,
            gradients="" if not self.frozen else "weight" if trained else self.input_alone,
        )
        if bias:
            self.weight(f"{name}.bias", problems * outputs, 0 if split == "column" else None)
            if split == "column":
                self.bias_kernel(problems * rows * outputs, added, divided=True)
        for part in self.adapted(name):
            self._adapter(
                f"{name}.{part}" if name else part,
                rows,
                (widths or {}).get(part, outputs),
                inputs,
                split=split,
                problems=problems,
            )

    def _adapter(self, name: str, rows: int, outputs: int, inputs: int, *, split: str, problems: int) -> None:
        """Two products of low rank, what scales and adds the second, and what they keep."""
        assert self.tuning is not None
        rank, every, size = self.tuning.rank, problems * rows, self.part.element_bytes
        if self.tuning.dropout:  # of its own, so that the adapters of one input keep a copy each
            self.moved(every * inputs, 2.5, divided=split == "row")
            self.saved.add((size + 1) * every * inputs, divided=split == "row")
        down, up = ("", "column") if split != "row" else ("row", "")
        self._product(f"{name}.lora_A", rows, rank, inputs, split=down, problems=problems, low=False, gradients="")
        self._product(f"{name}.lora_B", rows, outputs, rank, split=up, problems=problems, low=False, gradients="")
        self.saved.add(size * every * rank, divided=False)
        self.moved(every * outputs, self.software.adapter_arrays, divided=split == "column")

    def _product(
        self, name: str, rows: int, outputs: int, inputs: int, *, split: str, problems: int, low: bool, gradients: str
    ) -> None:
        every = problems * rows
        shape = (("m", rows), ("n", outputs), ("k", inputs))
        operator = Operator(
            kind="matmul",
            shape=shape if problems == 1 else (*shape, ("problems", problems)),
            batch="rows",
            forward_flop=2.0 * every * outputs * inputs,
            activation_bytes=FULL_BYTES * every * (outputs + inputs),
            parameter_bytes=FULL_BYTES * problems * outputs * inputs,
            function=NOT_LOW if not low else BY_EXPERT if problems > 1 else "",
            gradients=gradients,
        )
        if self.software.casts and self.software.cast_arrays and low:
            self.moved(every * inputs, self.software.cast_arrays, divided=split == "row")
        part = {"column": ("n", outputs), "row": ("k", inputs)}.get(split)
        self.add(operator, *((part[0], FULL_BYTES * every * part[1]) if part else ()))
        trained = gradients in ("", "weight")
        self.weight(name, problems * outputs * inputs, {"column": 0, "row": 1}.get(split), trainable=trained)
        gradient = self.part.element_bytes * problems * outputs * inputs if trained else 0
        if split:
            self.peak_fixed.divided = max(self.peak_fixed.divided, gradient)
        else:
            self.peak_fixed.whole = max(self.peak_fixed.whole, gradient)

    def qkv(self, tokens: int, queries: int, keys: int, hidden: int, *, bias: bool) -> None:
        """The product that makes queries, keys and values; its bias has no other kernel that could add it.
        The gradients of the three, which are views of one array, are copied together before the product's backward."""
        widths = {"q": queries, "k": keys, "v": keys}
        self.linear("qkv", tokens, queries + 2 * keys, hidden, split="column", bias=bias, added=BIAS, widths=widths)
        if self.software.bias_kernels:
            self.moved(tokens * (queries + 2 * keys), 0.0, divided=True, function=PARTS)

    def bias_kernel(self, elements: int, function: str, *, divided: bool) -> None:
        """What a bias costs beside fused kernels, `BIAS` or `BIAS_GRADIENT`, where the product's kernel does not do it.
        A frozen bias has no gradient."""
        if self.software.bias_kernels and not (self.frozen and function == BIAS_GRADIENT):
            self.moved(elements, 2.0 if function == BIAS else 0.0, divided=divided, function=function)

    def moved(
        self,
        elements: int,
        arrays: float,
        *,
        divided: bool,
        parameters: int = 0,
        function: str = "",
        batch: str = "batch",
    ) -> None:
        """A fused pointwise kernel over `elements` that moves so many arrays in its forward; `batch`: as of Operator."""
        size, gradients = round(FULL_BYTES * elements * arrays), ""
        if self.frozen and (parameters or not self.reached):
            gradients = self.input_alone
        elif self.frozen and function == BIAS:  # it hands its gradient on
            gradients = "none"
        operator = Operator(
            kind="memory_bound",
            shape=(("elements", elements),),
            batch=batch,
            forward_flop=0.0,
            activation_bytes=size,
            parameter_bytes=FULL_BYTES * parameters,
            function=function,
            gradients=gradients,
        )
        self.add(operator, *(("elements", size) if divided else ()))

    def sum_gradients(self) -> None:
        """The last operator: every microbatch adds its gradients of the parameters to those before it.
        Leaves out: experts, whose share of a rank depends on the plan."""
        if not self.software.gradient_arrays:
            return
        cut = {part.name for part in self.cut_parameters}
        for divided in (True, False):
            elements = sum(
                each.elements
                for each in self.parameters
                if each.trainable and (each.name in cut) == divided and ".experts." not in each.name
            )
            if elements:
                self.moved(elements, self.software.gradient_arrays, divided=divided, function=GRADIENT_SUM, batch="none")

    def norm(self, name: str, tokens: int, hidden: int, *, divided: bool, kind: str = "layer", arrays: float = 2.0) -> None:
        """A normalisation, read and written once by one kernel; `arrays` of one that takes several, which only RMS norms do."""
        elements = 2 * hidden if kind == "layer" else hidden
        self.moved(tokens * hidden, arrays if kind == "rms" else NORM_ARRAYS, divided=divided, parameters=elements)
        self.weight(f"{name}.weight", hidden)
        if kind == "layer":
            self.weight(f"{name}.bias", hidden)


NORM_ARRAYS = 2.0
"""That torch's layer norm moves: one kernel in eager mode too."""
RULE = "tensor"
SEQUENCE = "sequence"


ATTENTION_READS, MLP_READS = ("qkv", "q_down", "q_up", "kv_down"), ("mlp.up", "experts.up", "shared.up")
"""Products that read what a norm makes."""


def attention(layer: Layer, *, norm: bool, residual: bool) -> None:
    """From the stream to the product after attention; with the norm before and the residual after it, if they belong here."""
    shape, software, part = layer.shape, layer.software, layer.part
    n, h, d = part.tokens, shape.hidden, shape.dim
    queries, keys = shape.heads * d, shape.keys * d
    if norm:
        _entering_norm(layer, "norm1")
    if shape.key_rank:
        _latent_products(layer)
        width = shape.heads * (d + shape.rope_dim)
        layer.saved.add(part.element_bytes * n * (2 * width + 2 * queries + shape.query_rank + shape.key_rank), divided=True)
    else:
        layer.qkv(n, queries, keys, h, bias=shape.bias or shape.qkv_bias)
        layer.saved.add(part.element_bytes * n * (2 * queries + 2 * keys), divided=True)
        width = queries
    begin = len(layer.operators)
    if shape.qk_norm:
        layer.norm("q_norm", n * shape.heads, d, divided=True, kind="rms", arrays=software.norm_arrays)
        layer.norm("k_norm", n * shape.keys, d, divided=True, kind="rms", arrays=software.norm_arrays)
        layer.saved.add(part.element_bytes * n * (queries + keys), divided=True)
    if shape.sinks:
        layer.weight("sinks", shape.heads, 0)
    if shape.rotary:
        layer.moved(n * (queries + keys), software.rope_arrays, divided=True)
    layer.repeat("rope", layer.since(begin), part.element_bytes * n * (queries + keys) if shape.qk_norm else 0, divided=True)
    scores_of(layer, width // shape.heads)
    layer.linear("proj", n, h, queries, split="row", bias=shape.bias)
    layer.peak = Amount(part.element_bytes * n * h, part.element_bytes * n * (queries + 2 * keys))
    if residual:
        residual_of(layer, n * h, divided=not norm)


def _entering_norm(layer: Layer, name: str) -> None:
    """The norm of the stream before a sublayer; it keeps the stream and what it makes."""
    shape, software, part = layer.shape, layer.software, layer.part
    n, h, begin = part.tokens, shape.hidden, len(layer.operators)
    layer.norm(name, n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
    made = layer.input_bytes(*(ATTENTION_READS if name == "norm1" else MLP_READS)) * n * h
    layer.saved.add(part.element_bytes * n * h + made, divided=False)
    if name != "norm2" or not layer.given.total:  # a layer's second norm reads what its own attention has made
        layer.given.add(part.element_bytes * n * h, divided=False)
    layer.repeat("layernorm", layer.since(begin), made, divided=False)


def _latent_products(layer: Layer) -> None:
    """Multi-head latent attention: queries, of low rank or not, and keys and values from one latent array."""
    shape, part = layer.shape, layer.part
    n, h, d = part.tokens, shape.hidden, shape.dim
    if shape.query_rank:
        layer.linear("q_down", n, shape.query_rank, h, split="")
        layer.norm("q_norm", n, shape.query_rank, divided=False, kind="rms")
    begin = len(layer.operators)
    layer.linear("q_up", n, shape.heads * (d + shape.rope_dim), shape.query_rank or h, split="column")
    layer.repeat("mla_up_proj", layer.since(begin), part.element_bytes * n * shape.heads * (d + shape.rope_dim), divided=True)
    layer.linear("kv_down", n, shape.key_rank + shape.rope_dim, h, split="")
    layer.norm("kv_norm", n, shape.key_rank, divided=False, kind="rms")
    begin = len(layer.operators)
    layer.linear("kv_up", n, 2 * shape.heads * d, shape.key_rank, split="column")
    again = part.element_bytes * n * shape.heads * (2 * d + shape.rope_dim)  # keys as wide as queries, and values
    layer.repeat("mla_up_proj", layer.since(begin), again, divided=True)


def scores_of(layer: Layer, dim: int) -> None:
    shape, software, part = layer.shape, layer.software, layer.part
    n, keys, heads = part.tokens, part.context, shape.heads
    scores = heads * n * keys
    if software.flash:
        documents = n // keys
        heads, queries = round(heads * documents * software.attention_work), n // documents
        scores = heads * queries * keys
        operator = Operator(
            kind="attention",
            shape=(("heads", heads), ("q", queries), ("kv", keys), ("d", dim), ("kv_heads", shape.keys * documents)),
            batch="batch",
            forward_flop=4.0 * scores * dim,
            activation_bytes=FULL_BYTES * heads * dim * 2 * (queries + keys),
            parameter_bytes=0,
            function="causal" if shape.causal else "",
            gradients="" if layer.reached else "none",
        )
        layer.add(operator, "heads", operator.activation_bytes)
        layer.saved.add(FULL_BYTES * shape.heads * n, divided=True)
        layer.repeat("core_attn", layer.since(len(layer.operators) - 1), FULL_BYTES * shape.heads * n, divided=True)
        return
    begin = len(layer.operators)
    aligned = not software.aligned or dim % software.aligned == 0
    gradients = "" if layer.reached else "none"
    first = replace(_batched(heads, n, keys, dim, aligned), gradients=gradients)
    layer.add(first, "problems", first.activation_bytes)
    layer.moved(scores, software.score_arrays, divided=True)
    if software.dropout:
        layer.moved(scores, 2.5, divided=True)
    second = replace(_batched(heads, n, dim, keys, aligned), gradients=gradients)
    layer.add(second, "problems", second.activation_bytes)
    layer.moved(heads * n * dim, 2, divided=True)
    size = ((2 * part.element_bytes + 1) if software.dropout else part.element_bytes) * scores
    layer.saved.add(size, divided=True)
    layer.repeat("core_attn", layer.since(begin), size, divided=True)
    layer.peak.divided = part.element_bytes * 2 * scores


def _batched(problems: int, m: int, n: int, k: int, aligned: bool) -> Operator:
    return Operator(
        kind="matmul",
        shape=(("problems", problems), ("m", m), ("n", n), ("k", k)),
        batch="batch",
        forward_flop=2.0 * problems * m * n * k,
        activation_bytes=FULL_BYTES * problems * (m * n + m * k + n * k),
        parameter_bytes=0,
        function="" if aligned else UNALIGNED,
    )


def residual_of(layer: Layer, elements: int, *, divided: bool) -> None:
    """The addition to the stream, of the last product's bias too."""
    shape, software = layer.shape, layer.software
    layer.moved(elements, software.residual_arrays, divided=divided)
    if shape.bias:
        layer.bias_kernel(elements, BIAS_GRADIENT, divided=divided)
    if software.dropout:
        layer.saved.add(elements, divided=divided)


def mlp(layer: Layer, *, experts: bool, norm: bool, residual: bool) -> None:
    """From the stream to the product after the MLP; with the norm before and the residual after it, if they belong here."""
    shape, software, part = layer.shape, layer.software, layer.part
    n, h = part.tokens, shape.hidden
    if norm:
        _entering_norm(layer, "norm2")
    if experts:
        layer.linear("router", n, shape.experts, h, split="", bias=shape.expert_bias, low=False)
        visits = n * shape.active
        layer.moved(visits * h, software.permutation_arrays, divided=False)
        _feed(layer, max(1, visits // shape.experts), shape.expert_ffn, "experts", shape.experts)
        layer.saved.add(2 * part.element_bytes * visits * h, divided=False)
        if shape.shared_ffn:
            _feed(layer, n, shape.shared_ffn, "shared")
    else:
        _feed(layer, n, shape.inner, "mlp")
    if residual:
        residual_of(layer, n * h, divided=not norm)


GELU = (2.0, 2.0)
"""Arrays that it moves, and copies of the MLP's inside that are kept: one kernel in eager mode too."""


def _feed(layer: Layer, rows: int, inner: int, name: str, problems: int = 1) -> None:
    shape, software, part = layer.shape, layer.software, layer.part
    arms = 2 if shape.gated else 1
    bias = shape.expert_bias if name == "experts" else shape.bias
    widths = {"gate": inner, "up": inner}
    layer.linear(f"{name}.up", rows, arms * inner, shape.hidden, split="column", bias=bias, problems=problems, widths=widths)
    arrays, copies = (software.activation_arrays + 1, software.activation_saved) if shape.gated else GELU
    begin = len(layer.operators)
    layer.moved(problems * rows * inner, arrays, divided=True)
    activation = layer.since(begin)
    layer.linear(f"{name}.down", rows, shape.hidden, inner, split="row", bias=bias, problems=problems)
    if bias and name == "experts" and software.expert_bias_arrays:
        layer.moved(problems * rows * shape.hidden, software.expert_bias_arrays, divided=False)
    saved = copies if shape.gated else copies - 1
    size = round(problems * rows * inner * (part.element_bytes * saved + layer.input_bytes(f"{name}.down")))
    layer.saved.add(size, divided=True)
    again = max(0, size - problems * rows * inner * part.element_bytes * arms)  # what the product made stays
    layer.repeat("moe_act", activation, again, divided=True)
    layer.peak.whole = max(layer.peak.whole, part.element_bytes * problems * rows * shape.hidden)
    layer.peak.divided = max(layer.peak.divided, part.element_bytes * problems * rows * inner * (arms + 1))


def embed(model: Layer) -> Component:
    shape, software, part = model.shape, model.software, model.part
    n, h, layer = part.tokens, shape.hidden, model.another("wte" if shape.tied else "embed")
    lookup = Operator(
        kind="embedding",
        shape=(("rows", n), ("width", h)),
        batch="batch",
        forward_flop=0.0,
        activation_bytes=FULL_BYTES * 2 * n * h,
        parameter_bytes=0,
        gradients="none" if layer.frozen else "",
    )
    layer.add(lookup)
    layer.weight("weight", shape.vocab * h, 0)
    if shape.learned_positions:
        positions = Parameter(
            name="wpe.weight",
            elements=(shape.positions or n) * h,
            element_bytes=part.element_bytes,
            trainable=not layer.frozen,
        )
        layer.parameters.append(positions)
        layer.moved(n * h, 3, divided=False)
    if software.dropout:
        layer.moved(n * h, 2.5, divided=False)
        layer.saved.add(n * h, divided=False)
    if shape.embedding_norm:
        layer.norm("embedding_norm", n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
        layer.saved.add(part.element_bytes * n * h, divided=False)
    if layer.frozen:
        layer.saved = Amount()
    else:
        layer.peak_fixed.divided = part.element_bytes * shape.vocab * h
    rules = {RULE: (("full",), ("partial",))}
    return component_of("embed", layer, ("tokens",), ("x0",), rules, limit=EVEN * shape.vocab)


def head(model: Layer, reads: str, *, norm: bool) -> Component:
    """The last norm, and logits and loss of the tokens that count.
    Training in 8 bits leaves the product in 16 (`low`). Megatron-LM's head is not a layer of Transformer Engine unless
    `fp8_output_proj` is set (pull request 4825). torchao's example of float8 training leaves the last layer out."""
    shape, software, part = model.shape, model.software, model.part
    n, h, v, counted = part.tokens, shape.hidden, shape.vocab, part.loss_tokens or part.tokens
    layer = model.another("wte" if shape.tied else "lm_head")
    layer.linear("", counted, v, h, split="column", low=False)
    made = part.element_bytes * n * h if layer.input_bytes("") else 0
    if norm:
        begin = len(layer.operators)
        layer.norm("norm", n, h, divided=False, kind=shape.norm, arrays=software.norm_arrays)
        if layer.reached:
            layer.saved.add(part.element_bytes * n * h, divided=False)
            layer.given.add(part.element_bytes * n * h, divided=False)
            layer.repeat("layernorm", layer.since(begin), made, divided=False)
    layer.saved.add(made, divided=False)
    layer.moved(counted * v, software.loss_arrays, divided=True)
    wider = part.element_bytes - 2  # the sizes of Software are those of half precision
    layer.saved.add((software.loss_bytes + (wider if software.loss_bytes else 0)) * counted * v, divided=True)
    layer.peak = Amount(part.element_bytes * n * h, round((software.loss_peak + wider) * counted * v))
    rules = {RULE: (("full", "full"), ("partial",))}
    return component_of("head", layer, (reads, "target"), ("loss",), rules, limit=EVEN * v)


EVEN = 128
"""Frameworks pad the vocabulary so that it divides; every power of two up to this does."""


def component_of(
    name: str,
    layer: Layer,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    rules: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]],
    *,
    limit: int = 0,
) -> Component:
    """What a layer does as a component. `limit`: as of Sharding; 0: the heads."""
    limit = limit or (layer.shape.heads * (EVEN if layer.shape.experts else 1))
    layer.sum_gradients()
    if not layer.reached and not any(parameter.trainable for parameter in layer.parameters):  # it has no backward
        layer.saved, layer.given, layer.again = Amount(), Amount(), Amount()
    saved, peak, fixed = layer.saved, layer.peak, layer.peak_fixed
    selective, shard_selective = _by_operator(layer, inputs)
    shardings = tuple(
        Sharding(
            rule=rule,
            limit=limit,
            inputs=needs,
            outputs=makes,
            parameters=tuple(layer.cut_parameters) if rule == RULE else (),
            operators=tuple(layer.cut),
            saved_activation_bytes=saved.divided,
            forward_peaks=(DividedSize(saved.whole + peak.whole, 0, saved.divided + peak.divided, 0),),
            backward_peaks=(DividedSize(peak.whole, fixed.whole, peak.divided, fixed.divided),),
            selective=shard_selective,
        )
        for rule, (needs, makes) in rules.items()
    )
    return Component(
        name=name,
        inputs=inputs,
        outputs=outputs,
        parameters=tuple(layer.parameters),
        saved_activation_bytes=saved.total,
        forward_peaks=((saved.total + peak.total, 0),),
        backward_peaks=((peak.total, fixed.total),),
        operators=tuple(layer.operators),
        shardings=shardings,
        selective=selective,
    )


def _by_operator(layer: Layer, inputs: tuple[str, ...]) -> tuple[Selective[Size] | None, Selective[DividedSize] | None]:
    """What runs again by operator, of the whole component and of its shards.

    With unfused attention its core runs again, as in Megatron-LM; else norms, activation functions and rotations do. A second
    forward that stops early runs again whole, up to its last product (`Layer.stop_early`). Leaves out: gradients beside what
    the second forward makes, and what it makes and lets go of.
    """
    if layer.software.early_stop and layer.given.total:
        layer.stop_early()
    if not layer.again.total:
        return None, None
    stays = layer.saved.less(layer.given).less(layer.again)
    kept, again = (DividedSize(amount.whole, 0, amount.divided, 0) for amount in (stays, layer.again))
    first = DividedSize(stays.whole + layer.peak.whole, 0, stays.divided + layer.peak.divided, 0)
    shard = Selective(kept=kept, again=again, first_peaks=(first,), second_peaks=(again,))
    whole = Selective(
        values=inputs[:1] if layer.given.total else (),
        kept=kept.at(ALONE),
        again=again.at(ALONE),
        first_peaks=(first.at(ALONE),),
        second_peaks=(again.at(ALONE),),
        operators=tuple((number, 1) for number in sorted(layer.repeated)),
    )
    return whole, shard


def stream_value(model: Layer, name: str, producer: str, savers: tuple[str, ...], width: int | None = None) -> Value:
    """An array of `width` elements per token (None: the hidden size)."""
    size = model.part.element_bytes * model.part.tokens * (model.shape.hidden if width is None else width)
    return Value(name=name, producer=producer, bytes_per_sample=size, savers=savers)
