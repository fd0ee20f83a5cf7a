"""Stand-in for Transformer Engine's compiled extension: what its layers call, in plain torch.

te_site.py copies it beside Transformer Engine as `transformer_engine_torch`. It computes in float32
what the kernels compute, takes no float for an int, as they do not, and asserts what they take for
granted. Of every other name there is a placeholder that raises when it is called.
"""

import torch


class _Placeholder:
    """A name of the extension. Its attributes, an enumeration's members, are numbers."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, member):
        if member.startswith("__"):
            raise AttributeError(member)
        value = len(self.__dict__)
        setattr(self, member, value)
        return value

    def __call__(self, *_, **__):
        raise NotImplementedError(
            f"the stand-in of transformer_engine_torch has no {self.__name__}"
        )


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().setdefault(name, _Placeholder(name))


DType = _Placeholder("DType")
_DTYPES = {
    DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16,
}  # fmt: skip
NVTE_QKV_Format = _Placeholder("NVTE_QKV_Format")
NVTE_QKV_Layout = _Placeholder("NVTE_QKV_Layout")
NVTE_Mask_Type = _Placeholder("NVTE_Mask_Type")
NVTE_Bias_Type = _Placeholder("NVTE_Bias_Type")
NVTE_Softmax_Type = _Placeholder("NVTE_Softmax_Type")
NVTE_Fused_Attn_Backend = _Placeholder("NVTE_Fused_Attn_Backend")
layernorm_fwd = _Placeholder("layernorm_fwd")
layernorm_bwd = _Placeholder("layernorm_bwd")


def get_cudnn_version():
    return 92000


def generic_gemm(
    a, transa, b, transb, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad,
    workspace, workspace_size, accumulate, use_split_accumulator, *, comm_overlap, comm_type,
    extra_output, bulk_overlap, alpha, beta,
):  # fmt: skip
    """op(b) op(a), added to `out` or written there; bias: added, or its gradient computed."""
    assert quantizer is None and comm_overlap is None and not gelu and a.dtype == b.dtype
    rows, a, b = b.shape[:-1], a.flatten(0, -2), b.flatten(0, -2)
    left, right = b.t() if transb else b, a.t() if transa else a
    product = alpha * (left.float() @ right.float())
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.float().sum(0).to(_DTYPES[bias_dtype])
    elif bias is not None:
        product += bias.float()
    if out is None:
        assert not accumulate
        out = product.to(a.dtype if out_dtype is None else _DTYPES[out_dtype])
        out = out if transb else out.view(*rows, -1)
    else:
        assert out.shape == product.shape and out.dtype == _DTYPES[out_dtype]
        out.copy_(product + beta * out if accumulate else product)
    return out, bias_grad, gelu_in, extra_output


def rmsnorm_fwd(x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
    assert out is None and quantizer is None and not zero_centered
    rsigma = (x.float().square().mean(-1) + eps).rsqrt()
    normed = x.float() * rsigma[:, None] * weight.float()
    return normed.to(_DTYPES[out_dtype]), None, rsigma


def rmsnorm_bwd(grad, x, rsigma, weight, sm_margin, zero_centered):
    grad, hat = grad.float(), x.float() * rsigma[:, None]
    scaled = grad * weight.float()
    grad_x = (scaled - hat * (scaled * hat).mean(-1, keepdim=True)) * rsigma[:, None]
    return grad_x.to(x.dtype), (grad * hat).sum(0).to(weight.dtype)


def _rotate(x, angles, start_positions, form, interleaved, cu_seqlens, cp_size, sign):
    """x [tokens, heads, d], angles [positions, 1, 1, d]: by the position within each sequence."""
    assert form == NVTE_QKV_Format.NVTE_THD and cp_size == 1 and not interleaved
    assert start_positions is None and angles.dtype is torch.float32
    lengths = cu_seqlens.diff().tolist()
    assert max(lengths) <= angles.size(0), "a sequence is longer than the table"
    angle = torch.cat([angles[:n, 0] for n in lengths])
    if angle.size(0) < x.size(0):
        raise AssertionError("cu_seqlens end before the tokens")
    cos, sin = angle.cos(), sign * angle.sin()
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def fused_rope_forward(x, angles, start, form, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotate(x, angles, start, form, interleaved, cu_seqlens, cp_size, 1)


def fused_rope_backward(grad, angles, start, form, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotate(grad, angles, start, form, interleaved, cu_seqlens, cp_size, -1)


def get_fused_attn_backend(*_):
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


def _attend(q, k, v, cu_seqlens, scale):
    """Causal attention within each sequence; q [tokens, heads, d], k and v [tokens, groups, d]."""
    outputs, bounds, repeats = [], cu_seqlens.tolist(), q.size(1) // k.size(1)
    assert bounds[-1] == q.size(0), "cu_seqlens do not end at the tokens"
    for start, stop in zip(bounds, bounds[1:]):
        queries = q[start:stop].float().transpose(0, 1)
        keys, values = (
            x[start:stop].float().repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v)
        )
        scores = scale * queries @ keys.transpose(1, 2)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


def _check_attention(max_q, max_kv, layout, bias, mask, softmax, window, cu_q, cu_kv, dropout):
    assert layout == NVTE_QKV_Layout.NVTE_THD_THD_THD and dropout == 0
    assert bias == NVTE_Bias_Type.NVTE_NO_BIAS and softmax == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    assert mask == NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK and tuple(window) in ((-1, 0), (-1, -1))
    assert cu_q.dtype is torch.int32 and torch.equal(cu_q, cu_kv)
    if not type(max_q) is type(max_kv) is int:
        raise TypeError(f"incompatible function arguments: max_seqlen is {max_q!r}, {max_kv!r}")
    assert int(cu_q.diff().max()) <= max_q == max_kv, "a sequence is longer than max_seqlen"


def fused_attn_fwd(
    max_q, max_kv, is_training, scale, dropout, fast_zero_fill, layout, bias_type, mask, softmax,
    window, cu_q, cu_kv, q, k, v, dtype, cu_q_padded, cu_kv_padded, page_k, page_v, s_quantizer,
    o_quantizer, bias, softmax_offset, generator, elements, return_max_logit, cuda_graph,
):  # fmt: skip
    _check_attention(max_q, max_kv, layout, bias_type, mask, softmax, window, cu_q, cu_kv, dropout)
    output = _attend(q, k, v, cu_q, scale)
    return output, torch.zeros(1), torch.zeros(2, dtype=torch.int64)


def fused_attn_bwd(
    max_q, max_kv, scale, dropout, fast_zero_fill, layout, bias_type, mask, softmax, window,
    deterministic, cu_q, cu_kv, q, k, v, output, grad, dtype, te_dtype, saved, cu_q_padded,
    cu_kv_padded, s_quantizer, dp_quantizer, dqkv_quantizer, cuda_graph,
):  # fmt: skip
    _check_attention(max_q, max_kv, layout, bias_type, mask, softmax, window, cu_q, cu_kv, dropout)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_attend(*leaves, cu_q, scale), leaves, grad)


def multi_tensor_scale(chunk_size, overflow, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk_size, overflow, lists, per_tensor):
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms


def multi_tensor_adam(
    chunk_size, overflow, lists, lr, beta1, beta2, eps, step, adam_w, bias_correction, decay
):
    assert adam_w == 1 and bias_correction == 1
    if type(step) is not int:
        raise TypeError(f"incompatible function arguments: step is {step!r}")
    for grad, parameter, first, second in zip(*lists, strict=True):
        assert {x.dtype for x in (grad, parameter, first, second)} == {torch.float32}
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(eps)
        parameter.sub_(lr * (first / (1 - beta1**step) / root + decay * parameter))
