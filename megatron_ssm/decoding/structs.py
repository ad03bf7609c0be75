"""The structs of native/step.h, step.c and tokens.c, which tell C where a model's tensors are."""

import ctypes

import torch
from torch import Tensor

from megatron_ssm.native import products
from megatron_ssm.native.arguments import are_float32
from megatron_ssm.native.kernels import TYPES
from megatron_ssm.ops.quantized_matrices import QuantizedMatrix
from sparsefusion.native.library import FLOAT, INT, POINTER, SIZE


class Matrix(ctypes.Structure):
    """step.c's `Matrix`: a floating-point matrix, or a `QuantizedMatrix`."""

    _fields_ = [("values", POINTER), ("scales", POINTER), ("type", SIZE)]

    @classmethod
    def of(cls, weight: Tensor | QuantizedMatrix) -> "Matrix":
        """The struct of a tensor or a QuantizedMatrix."""
        if isinstance(weight, Tensor):
            return cls(weight.data_ptr(), None, TYPES[weight.dtype])
        return cls(weight.values.data_ptr(), weight.scales.data_ptr(), TYPES[weight.values.dtype])

    @staticmethod
    def supports(weight: Tensor | QuantizedMatrix, dtype: torch.dtype, rows: int, has_gaps: bool = False) -> bool:
        """Whether C multiplies so many rows of `dtype` by a matrix without a copy. has_gaps: see `products.has_kernel`."""
        values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
        return (
            values.is_cpu and values.is_contiguous() and not torch.is_autocast_enabled("cpu")
            and products.has_kernel(values.dtype, dtype, rows, products.columns_of(values), has_gaps)
            and are_float32(scales) and (scales is None or scales.is_contiguous())
        )  # fmt: skip


class Sum(ctypes.Structure):
    """step.c's `Sum`: an all-reduce."""

    _fields_ = [
        *((name, POINTER) for name in ("call", "channel", "parts", "total", "squares")),
        *((name, INT) for name in ("count", "done_by")),
    ]


_POINTERS = "norm in_bias out_bias conv conv_bias history A_log D dt_bias state gated_weight".split()
_WORKSPACE = "work parameters part dt squares wide_part next_state".split()
_SIZES = """batch tokens size channels N taps history_stride state_stride next_stride rank heads groups
    group_channels""".split()
NO_SUM, NO_MEMORY = -1, -2  # results of step.c's `decode`
UNUSUAL = -3  # another one, of tokens.c's `decode_tokens`
ONE_RANK, IN_C, IN_PYTHON = range(3)  # who does an all-reduce


class Layer(ctypes.Structure):
    """step.c's `Layer`."""

    _fields_ = [
        *((name, Matrix) for name in ("in_proj", "out_proj", "x_proj", "dt_proj")),
        *((name, Sum) for name in ("inner", "outer")),
        *((name, POINTER) for name in (*_POINTERS, *_WORKSPACE)),
        *((name, SIZE) for name in _SIZES),
        *((name, FLOAT) for name in ("least_dt", "most_dt", "eps", "inner_eps")),
        *((name, INT) for name in ("type", "sum_type", "mamba2", "speculative")),
    ]


class Head(ctypes.Structure):
    """step.c's `Head`: the final norm and the language-model head."""

    _fields_ = [
        ("matrix", Matrix),
        *((name, POINTER) for name in ("norm", "normed", "logits", "wide")),
        ("width", SIZE),
        ("eps", FLOAT),
    ]


class Layers(ctypes.Structure):
    """step.c's `Layers`: consecutive layers."""

    _fields_ = [
        *((name, POINTER) for name in ("layers", "head", "x", "given", "total")),
        *((name, SIZE) for name in ("count", "layer", "begun")),
    ]


class Tokens(ctypes.Structure):
    """tokens.c's `Tokens`: tokens of each sequence."""

    _fields_ = [
        ("embeddings", Matrix),
        ("sum", Sum),
        *((name, POINTER) for name in ("ids", "lengths", "part", "x", "layers")),
        *((name, SIZE) for name in ("batch", "tokens", "size", "vocabulary", "first", "rows", "begun")),
        *((name, INT) for name in ("type", "sum_type", "speculative")),
    ]
