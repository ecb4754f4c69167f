#!/usr/bin/env bash
# What a machine with a GPU is for, in three stages, each in under ten minutes from a bare checkout:
#
#     benchmarks/gpu.sh right    # are the kernels and the private step right on this chip?
#     benchmarks/gpu.sh time     # where does the time go, in each kernel and beside other libraries?
#     benchmarks/gpu.sh tune     # private over non-private steps of long contexts and of LoRA; then
#                                # the kernels' configurations
#
# right: versions, noise, gradients, attention, shards (tests of those kernels), steps (private steps
#        beside the CPU's), train, memcheck, racecheck. time: steps, ceilings, reductions, products,
#        rotary, attention, vendors, flex, ncu. tune: long, lora, tune. "dpflash-captured" is a step replayed
#        by CUDA graphs, "plain" the same model without privacy.
# Nothing is installed outside a temporary folder and nothing is fetched. A part that fails or runs
# out of time does not stop the others; one that needs what is not installed is skipped, by name.
# The exit status is 0 only if no part failed.
#
# Environment:
#   OUT      where results go (runs/gpu): STAGE.tar.xz, the table that is printed, STAGE.txt, and
#            compiled kernels, triton.tar.xz
#   PYTHON   the interpreter (.venv/bin/python where there is one, else python3)
#   WHEELS   a folder of wheels to take missing packages from (.whl)
#   CACHE    a triton.tar.xz of an earlier run, whose compiled kernels are taken
#   LIMIT_S  seconds for the stage (540)
#   DEVICE   cuda; cpu for a dry run of the script itself, tiny and without figures
#
# In half an hour: right, time, tune, in this order. Each prints a row a part: name, exit status (0,
# another number, "skipped" or "no time"), seconds, the last line. Keep STAGE.tar.xz; gpu-time.json in
# it has median_ms of each row, of private steps beside "plain".
#
# What waits for a chip, by worth. Predictions are for an H100, from counts of launches and of
# instructions; none is measured:
#   1. `steps`: sums, noise, norms and factors are one launch a gate each, where each parameter had
#      seven to ten; with the mask that is copied without a wait and rotary tables made once, flat
#      clipping takes 1.10 to 1.15 of plain at 184M parameters (1.31 before) and 40 to 48 ms at 29M
#      (61.6 before); no mode waits more than once a step (book_keeping: 37 times before).
#   2. `noise`, `gradients`: the bits of the reference from addresses in device memory; 16-byte
#      loads where all sums of a launch allow them; no spill (32 to 128 registers on sm_90).
#   3. `steps`: per_layer launches some 23 kernels a layer more than plain, book_keeping 15; the
#      latter's norms are those of what it sums, made twice by one kernel, no longer by estimates.
#   4. `long`, `lora`: plain is torch's attention, cuDNN's where there is one, and fused AdamW. What
#      a private step is above 1.1 of it is attention: cuDNN's is 1.9 times as fast as ours. LoRA on
#      6.6B parameters 1.05 to 1.15 at T = 1k and 4k, 1.4 to 1.5 at 32k; memory 1.0 to 1.1.
#   5. `reductions`, in graphs and so without the host: of 184M parameters noise 2.7 to 4.5 ms, 8
#      samples' clip_reduce 3.0 and squared_norm 2.0 (copy's bandwidth), clip_reduce with noise 4 to
#      5.5. Eager is the same there; at 29M it is the host's.
#   6. `products`: per_sample_grad at 380 to 420 TFLOP/s, bmm(out_dtype=float32) at 600: if bmm's
#      bits of a sample do not depend on B, it takes over. Ours do not.
#   7. `rotary`: q and k are read and written once, by one launch, where torch's operations took 18
#      (in place 10); 16-byte loads and stores, 48 registers on sm_90.
#   8. `noise`, `steps`: roundings that fp64 leaves open are settled on the device, once a step: one
#      launch of 4 to 10 us for the 2,400 of 184M parameters (2,000 instructions on sm_90, 61
#      registers, no spill), in place of a copy of each list to the host, and four back.
#   9. `steps`: "dpflash-captured" replays forward and clipped backward; at 29M parameters 8 to 12 ms,
#      1.4 to 2 times the plain step in one graph, where 1.4 was aimed at: losses, charge, noise and
#      the optimizer are launched by the host. `right` compares its weights with the CPU's.
#  10. `vendors`: dense and causal calls in 16 bit take cuDNN's forward, 1.6 to 2.1 times as fast as
#      ours, and our backward: 1.1 to 1.2 times in all; with FlashAttention 4, deterministic, 1.4, with
#      "fast" 1.9. Whether the bits of a sample in cuDNN's forward depend on the others is open.
#  11. `attention`: our kernels have shorter chunks (sm_90, D = 128, with a mask: forward 555
#      instructions for 718, dq 498 for 657, dkdv 371 for 480) and two dependent loads of tables in
#      place of five; dkdv copies 8 bytes a row, not twice 4. Patterns with many short runs (LongNet,
#      documents, block-sparse) should gain most, dense least. dkdv at 128x64 is to be timed: 436
#      instructions for 64 columns, 2 x 264 now, but it spills under Triton 3.6 (144 bytes).
#  12. Not built yet: norms in the epilogue of products, TMA attention.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 2
stage=${1:-}
here=$PWD
OUT=${OUT:-runs/gpu}
WHEELS=${WHEELS:-.whl}
LIMIT_S=${LIMIT_S:-540}
export DEVICE=${DEVICE:-cuda}
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-$here/.venv/bin/python}
PYTHON=${PYTHON:-python3}
if ! [[ $stage =~ ^(right|time|tune)$ && $LIMIT_S =~ ^[0-9]+$ ]]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
fi
if [ "$DEVICE" = cuda ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "DEVICE=cuda: $PYTHON has a torch that sees no GPU, or none; DEVICE=cpu is a dry run" >&2
  exit 2
fi
jobs=$(($(nproc) < 12 ? $(nproc) : 12))
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
results=$work/$stage
mkdir -p "$results/logs" "$work/site/dpflash" "$work/triton"

# The package's folders lie beside each other in the checkout; pyproject.toml maps them.
ln -s "$here"/dpflash/* "$here/kernels" "$here/accounting" "$work/site/dpflash/"
ln -s "$here/benchmarks" "$work/site/dpflash/bench"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" \
    "$WHEELS"/*.whl || echo "$WHEELS: not all wheels could be installed" >&2
fi
export PYTHONPATH=$work/site PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 XDG_CACHE_HOME=$work/cache TRITON_CACHE_DIR=$work/triton
[ "$DEVICE" = cuda ] && export TRITON_INTERPRET=0
if [ -n "${CACHE:-}" ]; then
  tar -xJf "$CACHE" -C "$work" triton || echo "$CACHE: no compiled kernels taken" >&2
fi
rm -f "$OUT/$stage.tar.xz" "$OUT/$stage.txt"

table=
failed=0
row() { # NAME STATUS SECONDS LAST_LINE
  table+=$(printf '%-14s %-8s %4d s  %s' "$1" "$2" "$3" "$4")$'\n'
}

# part NAME SECONDS COMMAND...: runs a command for at most so long, and what is left of the stage.
part() {
  local name=$1 limit=$2 left=$((LIMIT_S - SECONDS)) rc="no time" start=$SECONDS
  local log=$results/logs/$1.txt
  shift 2
  : >"$log"
  limit=$((limit < left ? limit : left))
  if [ "$limit" -ge 5 ]; then
    echo "== $name: at most $limit s"
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
    rc=$?
    # Progress bars overwrite themselves; only what they end with is kept.
    sed -i 's/.*\r//' "$log"
    tail -n 40 "$log" | cut -c1-200
    # After each part, should the machine be taken away.
    for what in "$stage" triton; do
      tar -C "$work" -cf - "$what" | xz -T0 -3 >"$work/part.xz"
      mv "$work/part.xz" "$OUT/$what.tar.xz"
    done
  fi
  [ "$rc" = 0 ] || failed=1
  row "$name" "$rc" $((SECONDS - start)) "$(grep . "$log" | tail -n 1 | cut -c1-110)"
}

# needing WHAT NAME SECONDS COMMAND...: a part, skipped where a package or a tool is missing.
needing() {
  local what=$1
  shift
  if command -v "$what" >/dev/null || "$PYTHON" -c "import $what" 2>/dev/null; then
    part "$@"
  else
    row "$1" skipped 0 "$what is not installed"
  fi
}

tests() { # NAME SECONDS FILES...
  local name=$1 limit=$2
  shift 2
  needing xdist "$name" "$limit" "$PYTHON" -m pytest -q -n "$jobs" -p no:cacheprovider --tb=short \
    --maxfail=60 "$@"
}

measure() { # SECONDS NAME...: parts of gpu_time.py; private steps make noise.
  local limit=$1 name
  shift
  for name in "$@"; do
    needing cryptography "$name" "$limit" "$PYTHON" benchmarks/scripts/gpu_time.py "$name" \
      --json "$results/gpu-time.json"
  done
}

case $stage in
  right)
    part versions 60 "$PYTHON" tests/gpu/versions.py "$DEVICE"
    tests noise 100 tests/kernels/test_noise_triton.py tests/kernels/test_grads_noise.py \
      tests/kernels/test_normal_tail_triton.py \
      tests/kernels/test_capture.py
    tests gradients 120 tests/kernels/test_grads_triton.py tests/kernels/test_rotary.py
    tests attention 200 tests/kernels/test_attention_triton.py tests/kernels/test_attention_squares.py \
      tests/kernels/test_attention_vendor.py
    tests shards 90 tests/kernels/test_tile_shard.py
    steps=20 sizes=()
    [ "$DEVICE" = cpu ] && steps=2 sizes=(--batch-size 4 --seq-len 128 --eval-windows 4)
    needing cryptography steps 130 "$PYTHON" tests/gpu/private_steps.py --jobs "$jobs" \
      --steps "$steps" --device "$DEVICE" --json "$results/gpu-private-steps.json"
    needing cryptography train 60 "$PYTHON" -m dpflash train --device "$DEVICE" --steps 4 \
      ${sizes[@]+"${sizes[@]}"} --out "$results/train"
    for tool in memcheck racecheck; do
      needing compute-sanitizer "$tool" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer \
        --tool $tool --error-exitcode 1 "$PYTHON" tests/gpu/tiny_calls.py "$DEVICE"
    done
    ;;
  time)
    measure 240 steps
    measure 60 ceilings reductions products
    measure 30 rotary
    measure 100 attention flex
    measure 90 vendors
    needing ncu ncu 60 ncu --clock-control none --target-processes all -k regex:_attention_ -c 3 \
      "$PYTHON" tests/gpu/tiny_calls.py "$DEVICE"
    ;;
  tune)
    measure 240 long
    measure 300 lora
    part tune 300 "$PYTHON" benchmarks/scripts/tune_attention.py --jobs "$jobs" \
      --try-seconds 180 --json "$results/tune-attention.json" \
      --write "$results/attention_configs.json"
    ;;
esac
{
  echo
  printf '%-14s %-8s %6s  %s\n' part status time 'last line'
  printf '%s' "$table"
} | tee "$OUT/$stage.txt"
exit "$failed"
