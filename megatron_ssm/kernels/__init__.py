"""Operations on one rank's tensors: scans, SSD, the gated delta rule, convolution, experts, products, AdamW.

Each has a plain PyTorch version, against which the fast ones are tested: the C kernels, whose sources are in `../native`,
and optional CUDA packages, which are imported only here.

In: tensors of this rank's channels or heads.
Out: tensors, with gradients through autograd, or states that are overwritten.
"""
