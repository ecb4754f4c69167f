#!/usr/bin/env bash
# What a machine with a GPU is for, in three stages, each in under ten minutes from a bare checkout:
#
#     benchmarks/gpu.sh right    # are the kernels and the private step right on this chip?
#     benchmarks/gpu.sh time     # where does the time go, beside other libraries?
#     benchmarks/gpu.sh tune     # the kernels' configurations, private over non-private steps
#
# Nothing is installed outside a temporary folder and nothing is fetched. A part that fails or runs
# out of time does not stop the others; one that needs what is not installed is skipped, by name.
# The exit status is 0 only if no part failed.
# Environment:
#   OUT      where results go (runs/gpu): STAGE.tar.xz, written again after each part, and the
#            table that is printed last, STAGE.txt
#   PYTHON   the interpreter (.venv/bin/python where there is one, else python3)
#   WHEELS   a folder of wheels to take missing packages from (.whl)
#   CACHE    an archive of an earlier run, whose compiled kernels are taken
#   LIMIT_S  seconds for the stage (540)
#   DEVICE   cuda; cpu for a dry run of the script itself, tiny and without figures
#   JOBS     processes at a time (the number of cores, 12 at most)
#   PARTS    some parts only, by name
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 2
stage=${1:-}
case $stage in
  right | time | tune) ;;
  *)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
here=$PWD
OUT=${OUT:-runs/gpu}
WHEELS=${WHEELS:-.whl}
LIMIT_S=${LIMIT_S:-540}
DEVICE=${DEVICE:-cuda}
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=$here/.venv/bin/python
fi
if ! "$PYTHON" -c ''; then
  echo "PYTHON=$PYTHON does not run" >&2
  exit 2
fi
if [ "$DEVICE" = cuda ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "DEVICE=cuda: $PYTHON has a torch that sees no GPU, or none; DEVICE=cpu is a dry run" >&2
  exit 2
fi
if ! [[ $LIMIT_S =~ ^[0-9]+$ ]]; then
  echo "LIMIT_S=$LIMIT_S: expected whole seconds" >&2
  exit 2
fi
case $stage in
  right) known="versions noise gradients attention shards steps train memcheck racecheck" ;;
  time) known="ceilings gradients attention flex steps ncu" ;;
  tune) known="tune long" ;;
esac
# Any white space separates names.
PARTS=$(echo ${PARTS:-})
for name in $PARTS; do
  case " $known " in
    *" $name "*) ;;
    *)
      echo "PARTS=$name: $stage has $known" >&2
      exit 2
      ;;
  esac
done
cores=$(nproc)
JOBS=${JOBS:-$((cores < 12 ? cores : 12))}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
results=$work/$stage
mkdir -p "$results/logs" "$work/site/dpflash"

# The package's folders lie beside each other in the checkout; pyproject.toml maps them.
ln -s "$here"/dpflash/* "$here/kernels" "$here/accounting" "$work/site/dpflash/"
ln -s "$here/benchmarks" "$work/site/dpflash/bench"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" \
    "$WHEELS"/*.whl || echo "$WHEELS: not all wheels could be installed" >&2
fi
export PYTHONPATH=$work/site PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export PATH=$PATH:/usr/local/cuda/bin
export XDG_CACHE_HOME=$work/cache
export DEVICE
[ "$DEVICE" = cuda ] && export TRITON_INTERPRET=0
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TRITON_CACHE_DIR=$work/triton
if [ -n "${CACHE:-}" ]; then
  tar -xJf "$CACHE" -C "$work" triton || echo "$CACHE: no compiled kernels taken" >&2
fi
# Only now: an earlier archive may be the one to take kernels from.
rm -f "$OUT/$stage.tar.xz" "$OUT/$stage.txt"

archive() {
  local smallest=
  (cd "$work" && tar -cf - "$stage" $([ -d triton ] && echo triton)) | xz -T0 -3 >"$work/all.xz"
  if [ "$(stat -c %s "$work/all.xz")" -gt $((15 << 20)) ]; then
    (cd "$work" && tar -cf - "$stage") | xz -T0 -3 >"$work/all.xz"
    smallest=" (without compiled kernels, which take too much)"
  fi
  mv "$work/all.xz" "$OUT/$stage.tar.xz"
  echo "results: $OUT/$stage.tar.xz$smallest" >"$work/said"
}

table=
failed=0
# part NAME SECONDS COMMAND...: runs a command for at most so long, and what is left of the stage.
part() {
  local name=$1 limit=$2
  shift 2
  [ -n "${PARTS:-}" ] && [[ " $PARTS " != *" $name "* ]] && return
  local left=$((LIMIT_S - SECONDS)) rc=0 start=$SECONDS log=$results/logs/$name.txt
  limit=$((limit < left ? limit : left))
  if [ "$limit" -lt 5 ]; then
    rc="no time"
    : >"$log"
  else
    echo "== $name: at most $limit s"
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
    rc=$?
    # Progress bars overwrite themselves; only what they end with is kept.
    sed -i 's/.*\r//' "$log"
    tail -n 40 "$log" | cut -c1-200
    archive
  fi
  [ "$rc" = 0 ] || failed=1
  table+=$(printf '%-14s %-8s %4d s  %s' "$name" "$rc" $((SECONDS - start)) \
    "$(grep . "$log" | tail -n 1 | cut -c1-110)")$'\n'
}

# needing WHAT NAME SECONDS COMMAND...: a part, skipped where a package or a tool is missing;
# that fails where the part was asked for.
needing() {
  local what=$1 name=$2
  shift
  if command -v "$what" >/dev/null || "$PYTHON" -c "import $what" 2>/dev/null; then
    part "$@"
  elif [ -z "${PARTS:-}" ] || [[ " $PARTS " == *" $name "* ]]; then
    table+=$(printf '%-14s %-8s %4d s  %s' "$name" skipped 0 "$what is not installed")$'\n'
    [ -z "${PARTS:-}" ] || failed=1
  fi
}

tests() {
  local name=$1 limit=$2
  shift 2
  needing xdist "$name" "$limit" "$PYTHON" -m pytest -q -n "$JOBS" -p no:cacheprovider --tb=short \
    --maxfail=60 "$@"
}

right() {
  part versions 60 "$PYTHON" tests/gpu/versions.py "$DEVICE"
  tests noise 100 tests/kernels/test_noise_triton.py tests/kernels/test_grads_noise.py \
    tests/kernels/test_capture.py
  tests gradients 120 tests/kernels/test_grads_triton.py tests/kernels/test_block_clipped_grad.py
  tests attention 200 tests/kernels/test_attention_triton.py tests/kernels/test_attention_squares.py
  tests shards 90 tests/kernels/test_tile_shard.py
  needing cryptography steps 130 "$PYTHON" tests/gpu/private_steps.py --jobs "$JOBS" \
    --device "$DEVICE" --json "$results/gpu-private-steps.json"
  needing cryptography train 60 "$PYTHON" -m dpflash train --device "$DEVICE" --steps 4 \
    --out "$results/train"
  for tool in memcheck racecheck; do
    needing compute-sanitizer "$tool" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer --tool $tool --error-exitcode 1 "$PYTHON" tests/gpu/tiny_calls.py "$DEVICE"
  done
}

# measure SECONDS NAME...: parts of gpu_time.py
measure() {
  local limit=$1 run
  shift
  for name in "$@"; do
    run=part
    # Private steps make noise.
    [[ $name == steps || $name == long ]] && run="needing cryptography"
    $run "$name" "$limit" "$PYTHON" benchmarks/scripts/gpu_time.py "$name" \
      --json "$results/gpu-time.json"
  done
}

time_parts() {
  measure 100 ceilings gradients attention flex
  measure 240 steps
  needing ncu ncu 60 ncu --clock-control none --target-processes all -k regex:_attention_ -c 3 \
    "$PYTHON" tests/gpu/tiny_calls.py "$DEVICE"
}

tune() {
  part tune 300 "$PYTHON" benchmarks/scripts/tune_attention.py --jobs "$JOBS" \
    --head-dims 64 128 --bits 16 --stages 2 3 --rounds 10 --try-seconds 180 \
    --json "$results/tune-attention.json" --write "$results/attention_configs.json"
  measure 240 long
}

case $stage in
  right) right ;;
  time) time_parts ;;
  tune) tune ;;
esac
{
  echo
  printf '%-14s %-8s %6s  %s\n' part status time 'last line'
  printf '%s' "$table"
  cat "$work/said" 2>/dev/null
} | tee "$OUT/$stage.txt"
exit "$failed"
