"""Number formats of the released checkpoint and of its caches, in plain torch.

``quantize_*`` makes stored bytes, ``dequantize_*`` reads them, ``fake_quantize_*`` does both at once without bytes and
equals ``dequantize(quantize(x))`` bit for bit. All values are float32 on the way in and out.

Formats: E4M3 (``float8_e4m3fn``, largest 448), E2M1 (magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; low nibble first),
UE8M0 (a byte b means 2^(b-127)). Rounding is to nearest, ties to even. Source: spec/model.md 2.4 and 8.3.
"""

import torch
from torch import Tensor

FP8_GROUP = 32
FP4_MX_GROUP = 32
FP4_NV_GROUP = 16
WEIGHT_BLOCK = 32

_FP8_MAX = 448.0
_FP8_MIN_AMAX = 1e-4
_FP4_MAX = 6.0
_FP4_MX_MIN_AMAX = 6.0 * 2.0**-126
_FP4_NV_MIN_AMAX = 6.0 * 2.0**-9

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLES = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES))
_BYTE_VALUES = torch.stack(
    (_NIBBLES[torch.arange(256) & 15], _NIBBLES[torch.arange(256) >> 4]), dim=1
)
_CODE_OF_DOUBLED = torch.zeros(13, dtype=torch.uint8)
for _code, _magnitude in enumerate(_MAGNITUDES):
    _CODE_OF_DOUBLED[int(2 * _magnitude)] = _code


def _groups(x: Tensor, group: int) -> Tensor:
    return x.unflatten(-1, (-1, group))


def _power_of_two_above(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal float32 ``x``."""
    bits = (x.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return bits.view(torch.float32)


def _scale_fp8(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_(min=_FP8_MIN_AMAX)
    return _power_of_two_above(amax.div_(_FP8_MAX))


def _scale_fp4_mx(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_(min=_FP4_MX_MIN_AMAX)
    return _power_of_two_above(amax.div_(_FP4_MAX))


def _scale_fp4_nv(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_(min=_FP4_NV_MIN_AMAX)
    return amax.div_(_FP4_MAX).clamp_(max=_FP8_MAX).to(torch.float8_e4m3fn).float()


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code, saturating at 6."""
    magnitude = x.abs().clamp_(max=_FP4_MAX)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


def _pack_e2m1(values: Tensor) -> Tensor:
    """E2M1 values [..., n] to bytes [..., n / 2], even element in the low nibble."""
    codes = _CODE_OF_DOUBLED[(values.abs() * 2).to(torch.int64)]
    codes = codes | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., n / 2] to float32 values [..., n]."""
    flat = packed.reshape(-1).to(torch.int32)
    return _BYTE_VALUES.index_select(0, flat).view(*packed.shape[:-1], 2 * packed.shape[-1])


def _exponent_byte(scale: Tensor) -> Tensor:
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def ue8m0_to_float(exponent: Tensor) -> Tensor:
    """UE8M0 bytes (uint8, or ``float8_e8m0fnu``) to float32 powers of two. Exact for bytes 1..254."""
    if exponent.dtype != torch.uint8:
        exponent = exponent.view(torch.uint8)
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def fake_quantize_fp8(x: Tensor) -> Tensor:
    """``x`` [..., n] as E4M3 with one UE8M0 scale per 32 channels. n is a multiple of 32."""
    groups = _groups(x, FP8_GROUP)
    scale = _scale_fp8(groups)
    return (_round_e4m3(groups / scale).float().mul_(scale)).view(x.shape)


def fake_quantize_fp4_mx(x: Tensor) -> Tensor:
    """``x`` [..., n] as E2M1 with one UE8M0 scale per 32 channels (index queries and keys)."""
    groups = _groups(x, FP4_MX_GROUP)
    scale = _scale_fp4_mx(groups)
    return _round_e2m1(groups / scale).mul_(scale).view(x.shape)


def fake_quantize_fp4_nv(x: Tensor) -> Tensor:
    """``x`` [..., n] as E2M1 with one E4M3 scale per 16 channels (main KV)."""
    groups = _groups(x, FP4_NV_GROUP)
    scale = _scale_fp4_nv(groups)
    return _round_e2m1(groups / scale).mul_(scale).view(x.shape)


def quantize_fp8_row(x: Tensor) -> Tensor:
    """``x`` [..., n] to bytes [..., n + n / 32]: E4M3 values, then their UE8M0 scales."""
    groups = _groups(x, FP8_GROUP)
    scale = _scale_fp8(groups)
    values = _round_e4m3(groups / scale).view(torch.uint8).view(x.shape)
    return torch.cat((values, _exponent_byte(scale).squeeze(-1)), dim=-1)


def dequantize_fp8_row(row: Tensor) -> Tensor:
    """Bytes [..., n + n / 32] of ``quantize_fp8_row`` to float32 [..., n]."""
    n = row.shape[-1] * FP8_GROUP // (FP8_GROUP + 1)
    values = row[..., :n].contiguous().view(torch.float8_e4m3fn).float()
    scale = ue8m0_to_float(row[..., n:])
    return (_groups(values, FP8_GROUP) * scale.unsqueeze(-1)).flatten(-2)


def quantize_fp4_nv_row(x: Tensor) -> Tensor:
    """``x`` [..., n] to bytes [..., n / 2 + n / 16]: packed E2M1, then E4M3 scales."""
    groups = _groups(x, FP4_NV_GROUP)
    scale = _scale_fp4_nv(groups)
    packed = _pack_e2m1(_round_e2m1(groups / scale).view(x.shape))
    scales = scale.squeeze(-1).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((packed, scales), dim=-1)


def dequantize_fp4_nv_row(row: Tensor) -> Tensor:
    """Bytes [..., n / 2 + n / 16] of ``quantize_fp4_nv_row`` to float32 [..., n]."""
    half = row.shape[-1] * FP4_NV_GROUP // (FP4_NV_GROUP + 2)
    values = _unpack_e2m1(row[..., :half])
    scale = row[..., half:].contiguous().view(torch.float8_e4m3fn).float()
    return (_groups(values, FP4_NV_GROUP) * scale.unsqueeze(-1)).flatten(-2)


def quantize_fp4_mx_row(x: Tensor) -> Tensor:
    """``x`` [..., n] to bytes [..., n / 2 + n / 32]: packed E2M1, then UE8M0 scales."""
    groups = _groups(x, FP4_MX_GROUP)
    scale = _scale_fp4_mx(groups)
    packed = _pack_e2m1(_round_e2m1(groups / scale).view(x.shape))
    return torch.cat((packed, _exponent_byte(scale).squeeze(-1)), dim=-1)


def dequantize_fp4_mx_row(row: Tensor) -> Tensor:
    """Bytes [..., n / 2 + n / 32] of ``quantize_fp4_mx_row`` to float32 [..., n]."""
    half = row.shape[-1] * FP4_MX_GROUP // (FP4_MX_GROUP + 2)
    values = _unpack_e2m1(row[..., :half])
    return (_groups(values, FP4_MX_GROUP) * ue8m0_to_float(row[..., half:]).unsqueeze(-1)).flatten(
        -2
    )


def quantize_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 weight: ``weight`` [out, in] to (``float8_e4m3fn`` [out, in], UE8M0 bytes [out/32, in/32], rounded up).

    A block's scale is the power of two that brings its largest magnitude to at most 448.
    """
    out_features, in_features = weight.shape
    pad_out, pad_in = -out_features % WEIGHT_BLOCK, -in_features % WEIGHT_BLOCK
    padded = torch.nn.functional.pad(weight, (0, pad_in, 0, pad_out))
    blocks = padded.unflatten(1, (-1, WEIGHT_BLOCK)).unflatten(0, (-1, WEIGHT_BLOCK))
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_(min=_FP8_MIN_AMAX)
    scale = _power_of_two_above(amax / _FP8_MAX)
    values = _round_e4m3(blocks / scale).flatten(2, 3).flatten(0, 1)
    return values[:out_features, :in_features].contiguous(), _exponent_byte(scale)[:, 0, :, 0]


def dequantize_fp8_blocks(values: Tensor, scale: Tensor) -> Tensor:
    """FP8 weight (``float8_e4m3fn`` [out, in]) with UE8M0 scales [ceil(out/32), ceil(in/32)] to float32."""
    full = (
        ue8m0_to_float(scale).repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    )
    return values.float() * full[: values.shape[0], : values.shape[1]]


def quantize_fp8_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Engram table: ``table`` [rows, n] to (``float8_e4m3fn`` [rows, n], UE8M0 bytes [rows, n / 32])."""
    groups = _groups(table, FP8_GROUP)
    scale = _scale_fp8(groups)
    return _round_e4m3(groups / scale).view(table.shape), _exponent_byte(scale).squeeze(-1)


def dequantize_fp8_rows(values: Tensor, scale: Tensor) -> Tensor:
    """``float8_e4m3fn`` [..., n] with UE8M0 scales [..., n / 32] to float32."""
    groups = _groups(values.float(), FP8_GROUP)
    return (groups * ue8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def quantize_fp4_experts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 weight: ``weight`` [out, in] to (int8 [out, in / 2], UE8M0 bytes [out, in / 32])."""
    row = quantize_fp4_mx_row(weight)
    half = weight.shape[-1] // 2
    return row[..., :half].contiguous().view(torch.int8), row[..., half:].contiguous()


def dequantize_fp4_experts(packed: Tensor, scale: Tensor) -> Tensor:
    """FP4 weight (int8 or uint8 [out, in / 2]) with UE8M0 scales [out, in / 32] to float32 [out, in]."""
    values = _unpack_e2m1(packed.view(torch.uint8))
    return (_groups(values, FP4_MX_GROUP) * ue8m0_to_float(scale).unsqueeze(-1)).flatten(-2)
