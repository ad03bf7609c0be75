"""Pretrain a language model of any supported family on text files, on one rank or several.

torchrun --nproc-per-node 2 -- examples/pretrain.py --tensor-model-parallel-size 2 --data TEXT... --out DIR
"""

from megatron_ssm.cli.pretrain import main, run_and_exit

__all__ = ["main"]

if __name__ == "__main__":
    run_and_exit()
