"""LoRA adapters that PEFT has made for small checkpoints, and the tokens that transformers generates with them."""

import warnings
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf import precisely
from serving import checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

TARGETS = {
    "mamba2": ["in_proj"],
    "falcon_h1": ["in_proj", "q_proj", "v_proj", "o_proj", "down_proj"],
    "qwen3_5_text": ["in_proj_qkv", "out_proj", "k_proj", "up_proj"],
    "zamba2": ["in_proj", "q_proj", "gate_up_proj", "linear"],
}


@cache
def adapters(family, name):
    """A directory of random adapters for a family's checkpoint, different for each name; made before ranks are forked."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[family]))
    generator = torch.Generator().manual_seed(len(name) + ord(name[0]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    directory = Path(f"{checkpoint(family)}-{name}")
    adapted.save_pretrained(directory)
    return directory


@cache
def oracle(family, name):
    """transformers' model in float64 with the adapters; name "": without."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float64).eval()
    return peft.PeftModel.from_pretrained(model, adapters(family, name)) if name else model


@torch.no_grad()
def greedy_tokens(family, name, prompt, new):
    """The tokens of greedy search by `oracle`, each from the logits of the whole text before it."""
    model, tokens = oracle(family, name), list(prompt)
    with precisely(torch.float64):
        for _ in range(new):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
