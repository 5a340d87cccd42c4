"""What a framework runs besides the products of a transformer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parsim.errors import ModelError
from parsim.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a framework runs besides the products.

    Attributes:
        flash: attention is one kernel. dropout: after attention, after the two sublayers and inside attention.
        activation_arrays: moved by the activation function's kernels per element of the MLP's inside, gated or not.
        residual_arrays: moved by the addition of the residual. activation_saved: copies of the MLP's inside that are kept.
        score_arrays: moved between the two products of unfused attention; 2 where scale, mask and softmax are one kernel.
        norm_arrays: moved by a norm. selective: the inside of attention is computed again.
        loss_bytes: kept per logit. loss_peak: of gradients per logit at the fullest moment.
        loss_arrays: of 2 bytes per logit that the loss moves in its forward.
        gradient_arrays: of 2 bytes per parameter that a microbatch moves to add its gradients to those of the ones before.
        aligned: channels of a head by a multiple of which unfused attention keeps its tensor cores; 0: by any number.
        attention_work: seconds of its flash attention over those of the kernel that parts know (FlashAttention-2, cuDNN).
        casts: inputs of products are cast to 8 bits, in both orders.
        early_stop: a second forward ends once the backward has all that it reads, so the last product of a layer does not run
            again: torch's checkpoint without reentry, from torch 2.1 on (`torch.utils.checkpoint.set_checkpoint_early_stop`).
        bias_kernels: gradients of biases are sums of their own, the bias of queries, keys and values is added by a kernel of
            its own, and the gradients of the three are copied together. Newer libraries do the first two in the product.
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
    selective: bool = False
    loss_bytes: int = 6
    loss_peak: int = 4
    loss_arrays: float = 8.0
    gradient_arrays: float = 0.0
    aligned: int = 0
    early_stop: bool = False
    bias_kernels: bool = False


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

    Args:
        heads: of all samples of a microbatch on one rank. keys: that a query attends to.
    """
    return heads % FUSED_SOFTMAX_BATCH == 0 and keys <= FUSED_SOFTMAX_KEYS


EAGER = Software(flash=True, dropout=False, residual_arrays=3.0, loss_bytes=6, loss_arrays=10.0)
"""Eager PyTorch with flash attention: nothing else is fused."""

EAGER_LLAMA = replace(EAGER, rope_arrays=10.0, norm_arrays=18.0, activation_arrays=4.0, activation_saved=3.0)
"""Eager Llama: rotation and RMSNorm in fp32, operation by operation (bytes of each pass added up)."""

COMPILED = Software(flash=True, dropout=False, residual_arrays=2.0, rope_arrays=2.0, activation_saved=2.0, loss_bytes=6)
"""torch.compile, or the fused kernels of Transformer Engine."""

KERNELS: Registry[Software] = Registry(
    "kernels", Software, {"fused": COMPILED, "eager": EAGER_LLAMA, "unfused-attention": UNFUSED}, error=ModelError
)
"""What `args = { kernels = ... }` of a model by name chooses."""
