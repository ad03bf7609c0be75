"""Operations on one rank's tensors: selective scan, SSD, gated delta rule, convolution, experts, linear, AdamW.

Each has a plain PyTorch version, against which the fast ones are tested. Optional CUDA packages are imported only here.

In: tensors of this rank's channels or heads.
Out: tensors; gradients through autograd.
"""
