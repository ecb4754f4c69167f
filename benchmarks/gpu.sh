#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the tests, the tile sizes, the measurements.
#
#     BUDGET_S=570 benchmarks/gpu.sh
#     PARTS="attention variants" benchmarks/gpu.sh
#
# A part that fails or runs out of time does not stop the others; the exit status is 0 only if all
# parts ended with 0. Environment:
#   OUT        where JSON and logs go (runs/gpu)
#   BUDGET_S   seconds for everything (570); each part is cut off when its share is spent
#   QUICK      1 (as without it): small cases, for about ten minutes; 0: all of them
#   PARTS      which parts, in this order (all: the tests, the tile sizes, suites of dpflash bench)
#   PYTHON     the interpreter of the environment (.venv/bin/python, else python3)
#   JOBS       processes that compile at a time (the number of cores, 12 at most)
set -u
cd "$(dirname "$0")/.." || exit 2

OUT=${OUT:-runs/gpu}
BUDGET_S=${BUDGET_S:-570}
QUICK=${QUICK:-1}
ALL="tests tune attention variants private-step optimize max-length batch sequence heads"
PARTS=${PARTS:-$ALL}
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
cores=$(nproc)
JOBS=${JOBS:-$((cores < 12 ? cores : 12))}
export TRITON_INTERPRET=0
mkdir -p "$OUT"
# Two logs for all parts, because some places bring back few files only.
: >"$OUT/gpu.log" >"$OUT/gpu.err"
errors=$(mktemp) || exit 2
trap 'rm -f "$errors"' EXIT
begin=$SECONDS
failed=()

if ! "$PYTHON" -c 'import dpflash, triton' 2>"$errors"; then
  tail -n 1 "$errors" >&2
  echo "PYTHON=$PYTHON cannot import dpflash and triton: pip install -e '.[dev]', or without" \
    "network: pip install --no-build-isolation --no-deps -e ." >&2
  exit 2
fi

# part NAME PERCENT COMMAND...: runs a command for at most that part of what is left.
part() {
  local name=$1 percent=$2
  shift 2
  local left=$((BUDGET_S - (SECONDS - begin)))
  local limit=$((left * percent / 100))
  if [ "$limit" -lt 5 ]; then
    echo "== $name: no time left"
    failed+=("$name(no time)")
    return
  fi
  echo "== $name: at most $limit s: $*"
  local start=$SECONDS
  echo "== $name: $*" | tee -a "$OUT/gpu.err" >>"$OUT/gpu.log"
  local before
  before=$(wc -l <"$OUT/gpu.log")
  timeout --kill-after=10 "$limit" "$@" >>"$OUT/gpu.log" 2>"$errors"
  local rc=$?
  tail -n "+$((before + 1))" "$OUT/gpu.log" | tail -n 25 | cut -c1-240
  # Progress bars overwrite themselves; only what they end with is kept.
  sed 's/.*\r//' "$errors" >>"$OUT/gpu.err"
  if [ "$rc" -ne 0 ]; then
    sed 's/.*\r//' "$errors" | tail -n 5 | cut -c1-400
    failed+=("$name($rc)")
  fi
  echo "== $name: exit status $rc after $((SECONDS - start)) s"
}

tests() {
  part tests 30 "$PYTHON" -c \
    'import sys, pytest; sys.path.remove(""); sys.exit(pytest.main(sys.argv[1:]))' \
    -m gpu -q -p no:cacheprovider
}

tune() {
  local left=$((BUDGET_S - (SECONDS - begin)))
  # Trials take most of the time; what was tried until then is timed and written.
  local which=(--try-seconds $((left * 18 / 100)))
  [ "$QUICK" = 1 ] && which+=(--head-dims 64 128 --bits 16 --stages 2 3 --rounds 10)
  part tune 30 "$PYTHON" benchmarks/tune_attention.py --jobs "$JOBS" \
    --json "$OUT/tune_attention.json" "${which[@]}"
  cp kernels/attention_configs.json "$OUT/attention_configs.json"
}

# suite NAME PERCENT: a suite of `dpflash bench`; its JSON is written again after each comparison,
# so a suite that is cut off leaves what it has.
suite() {
  local which=(--max-seconds 60)
  [ "$QUICK" = 1 ] && which=(--quick --max-seconds 5)
  part "$1" "$2" "$PYTHON" -m dpflash bench "$1" --device cuda --out "$OUT" "${which[@]}"
}

for name in $PARTS; do
  case $name in
    tests | tune) "$name" ;;
    attention) suite attention 30 ;;
    variants) suite variants 30 ;;
    private-step) suite private-step 30 ;;
    optimize) suite optimize 30 ;;
    max-length) suite max-length 40 ;;
    batch) suite batch 40 ;;
    sequence) suite sequence 60 ;;
    heads) suite heads 100 ;;
    *)
      echo "PARTS=$name: expected some of: $ALL" >&2
      failed+=("$name(unknown)")
      ;;
  esac
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; logs are in $OUT"
  exit 1
fi
echo "all parts ended with 0; results are in $OUT"
