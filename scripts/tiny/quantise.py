"""Fake quantisation with straight-through gradients, and the storage format of every weight (spec 2.4, 8.2, 8.3)."""

import torch

E4M3_MAX, E2M1_MAX = 448.0, 6.0
FP8_FLOOR = 1e-4  # smallest group maximum that sets an FP8 scale
FP4_MX_FLOOR = 6 * 2.0**-126
FP4_NV_FLOOR = 6 * 2.0**-9


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 x), exact, x > 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def round_to_grid(x: torch.Tensor, smallest_exponent: int, mantissa_bits: int) -> torch.Tensor:
    """Nearest-even rounding to a small float format: add and take away a number whose last bit is the wanted step."""
    octave = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    octave = octave.clamp_min_(2.0**smallest_exponent).mul_(1.5 * 2.0 ** (23 - mantissa_bits))
    return (x + octave).sub_(octave)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 value, saturating."""
    return round_to_grid(x.clamp(-E4M3_MAX, E4M3_MAX), -6, 3)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value, saturating."""
    return round_to_grid(x.clamp(-E2M1_MAX, E2M1_MAX), 0, 1)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """qdq_fp8: groups of 32 along the last axis."""
    groups = x.reshape(-1, 32)
    scale = power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(FP8_FLOOR) / E4M3_MAX)
    return (round_e4m3(groups / scale) * scale).view(x.shape)


def fp4_mx(x: torch.Tensor) -> torch.Tensor:
    """qdq_fp4_mx: groups of 32 along the last axis."""
    groups = x.reshape(-1, 32)
    scale = power_of_two_above(
        groups.abs().amax(-1, keepdim=True).clamp_min(FP4_MX_FLOOR) / E2M1_MAX
    )
    return (round_e2m1(groups / scale) * scale).view(x.shape)


def fp4_nv(x: torch.Tensor) -> torch.Tensor:
    """qdq_fp4_nv: groups of 16 along the last axis, E4M3 scales."""
    groups = x.reshape(-1, 16)
    scale = round_e4m3(groups.abs().amax(-1, keepdim=True).clamp_min(FP4_NV_FLOOR) / E2M1_MAX)
    return (round_e2m1(groups / scale) * scale).view(x.shape)


class StraightThrough(torch.autograd.Function):
    """Applies a rounding; the gradient passes unchanged."""

    @staticmethod
    def forward(_ctx, x, rounding):
        return rounding(x)

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


def straight_through(x: torch.Tensor, rounding, enabled: bool) -> torch.Tensor:
    """`rounding(x)` with gradient 1, or `x` itself when fake quantisation is off."""
    return StraightThrough.apply(x, rounding) if enabled else x


def storage_format(name: str) -> str:
    """How the release stores the tensor `name`: fp8_block, fp8_row, fp4, bf16 or f32."""
    if name.endswith("engram.embed.weight"):
        return "fp8_row"
    if ".ffn.experts." in name:
        return "fp4"
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl")) or ".hc_" in name:
        return "f32"
    fp8 = (
        "attn.wq_a.weight",
        "attn.wq_b.weight",
        "attn.wkv.weight",
        "attn.wo_a.weight",
        "attn.wo_b.weight",
        "indexer.wq_b.weight",
        "engram.wkv.weight",
        "main_proj.weight",
    )
    if name.endswith(fp8) or ".shared_experts." in name:
        return "fp8_block"
    return "bf16"


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scales [out/32, in/32] of the 32 x 32 blocks of an FP8 weight."""
    out, width = weight.shape
    maximum = weight.view(out // 32, 32, width // 32, 32).abs().amax((1, 3))
    return power_of_two_above(maximum.clamp_min(FP8_FLOOR) / E4M3_MAX)


def round_to_storage(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The values that a reader of the checkpoint gets back for `weight`, fp32."""
    kind = storage_format(name)
    if kind == "fp8_block":
        scale = block_scales(weight).repeat_interleave(32, 0).repeat_interleave(32, 1)
        return round_e4m3(weight / scale) * scale
    if kind == "fp8_row":
        return fp8(weight)
    if kind == "fp4":
        return fp4_mx(weight)
    return weight.bfloat16().float() if kind == "bf16" else weight
