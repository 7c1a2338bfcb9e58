"""Operations of torch by what they do to a scale, a slope or a sum: the words in which a trace is read."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\S+", text))


# Other names of the same operation.
SYNONYMS: dict[str, str] = dict(
    pair.split("=")
    for pair in [
        "iadd=add",
        "radd=add",
        "isub=sub",
        "rsub=sub",
        "subtract=sub",
        "imul=mul",
        "rmul=mul",
        "multiply=mul",
        "itruediv=div",
        "truediv=div",
        "divide=div",
        "true_divide=div",
        "rmatmul=matmul",
        "mm=matmul",
        "bmm=matmul",
        "concat=cat",
        "concatenate=cat",
        "clip=clamp",
        "absolute=abs",
        "negative=neg",
        "H=T",
        "swapaxes=transpose",
        "swapdims=transpose",
    ]
)

# Linear in all tensor operands together, or a choice among them that does not change within a region.
STRAIGHT = _words("""
    add sub neg cat stack hstack vstack dstack flatten unflatten view view_as reshape reshape_as ravel squeeze
    unsqueeze permute transpose t T mT movedim moveaxis contiguous clone expand expand_as broadcast_to repeat
    repeat_interleave tile roll flip rot90 getitem select narrow index_select gather take take_along_dim split
    chunk unbind tensor_split split_with_sizes unfold fold pad constant_pad_nd mean sum cumsum nansum avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d upsample interpolate
    pixel_shuffle pixel_unshuffle channel_shuffle dropout dropout1d dropout2d dropout3d alpha_dropout
    feature_alpha_dropout feature_dropout to type float double type_as diagonal diag diag_embed tril triu trace
    identity zero data index_add scatter_add relu relu6 leaky_relu rrelu threshold hardtanh hardsigmoid hardshrink softshrink clamp
    clamp_min clamp_max abs max min maximum minimum fmax fmin amax amin max_pool1d max_pool2d max_pool3d
    boolean_dispatch max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices
    adaptive_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d sort topk median where masked_fill
    masked_select sign floor ceil round trunc heaviside zeros_like ones_like empty_like full_like new_zeros
    new_ones new_empty new_full setitem copy requires_grad detach alias as_strided atleast_1d atleast_2d
    atleast_3d native_channel_shuffle block_diag meshgrid nan_to_num real
""")
# The result does not change with the input: constants of the same shape, and step functions.
CONSTANT = _words("""
    detach data zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full
    sign floor ceil round trunc heaviside
""")
# Linear in each operand by itself.
PRODUCTS = _words("""
    mul prelu linear matmul einsum baddbmm addmm addbmm addmv mv dot inner outer ger bilinear tensordot kron
""")
RECURRENT = _words("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
CONVOLUTIONS = _words("conv1d conv2d conv3d")
TRANSPOSED = _words("conv_transpose1d conv_transpose2d conv_transpose3d")
NORMALIZATIONS = _words("layer_norm group_norm instance_norm batch_norm rms_norm")
# Operations that use a parameter as a scale or a shift, entry by entry or channel by channel.
VECTOR_USES = _words("add sub mul expand prelu batch_norm group_norm instance_norm layer_norm rms_norm")
BIASED = frozenset(["linear"]) | CONVOLUTIONS | TRANSPOSED
# Python functions of torch whose bodies hold linear maps of parameters; the trace walks into them.
COMPOSITE = frozenset(["multi_head_attention_forward"])
