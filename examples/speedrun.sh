#!/usr/bin/env bash
# From text to a chat with a model of your own: nine minutes on two cores of an EPYC (Zen 4); nothing is downloaded.
#     source .venv/bin/activate
#     examples/speedrun.sh [DIRECTORY]      (default: speedrun)
# It can be interrupted: started again, it continues the training run where it stopped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-speedrun}
mkdir -p "$out"
cd "$out"
export OMP_NUM_THREADS=1 # one for each of two ranks

# 1. The text: Python's documentation and docstrings, 1.7 MB to train on and 8 topics that are held out.
python "$here/corpus.py" text

# 2. Questions and answers: 4,131 lines like
#    {"text": "Question: What does textwrap.dedent do?\nAnswer: Remove any common leading whitespace ..."}
#    and a chat template that puts what you type into the same form.
python "$here/questions.py" questions

# 3. A tokenizer with 2,048 tokens.
python "$here/tokenizer.py" tokenizer 2048 text/train/*.txt

# 4. Pretraining of a hybrid with Mamba-2, attention and MLP blocks, 2.6 M parameters, on two tensor-parallel ranks.
#    In under seven minutes, the loss falls from 7.7 to 2.3 nats per token; the held-out topics have 1.03 nats per byte.
train() { torchrun --standalone --nproc-per-node 2 -- "$here/pretrain.py" --tensor-model-parallel-size 2 --resume auto "$@"; }
train --config "$here/configs/hybrid-small.yaml" --tokenizer-model tokenizer \
    --data text/train --valid-data-path text/held_out --seq-length 256 --micro-batch-size 8 --global-batch-size 8 \
    --train-iters 1200 --save-interval 200 --out base --log base.jsonl

# 5. Learning to answer: the same model goes on with the questions. In two minutes, the loss falls from 4.7 to 1.1;
#    the questions that are held out have 0.71 nats per byte.
train --init-from base --data questions/questions.jsonl --seq-length 256 --micro-batch-size 8 --global-batch-size 8 \
    --train-iters 400 --lr 1e-3 --lr-warmup-iters 20 --out chat --log chat.jsonl
cp questions/chat_template.jinja chat

# 6. A smaller file: matrices in 8 bits, 2.8 instead of 10.5 MB.
[ -e chat-int8 ] || megatron-ssm convert --model chat --weights int8 --out chat-int8

# 7. Ask it. So small a model answers in the style of the documentation, and is mostly wrong: "Return the current value of the
#    current frame."
python -m megatron_ssm generate --model chat-int8 --max-new-tokens 60 --prompt $'Question: What does textwrap.dedent do?\nAnswer:'

# 8. Chat in the browser, at http://127.0.0.1:8000; Ctrl-C ends it.
megatron-ssm serve --model chat-int8
