"""Pretraining: options, data, the training loop (tensor- and data-parallel), and the run that `examples/pretrain.py` starts.

In: text files, a tokenizer and options from the command line or a YAML file.
Out: losses, training checkpoints and a Hugging Face directory.
"""
