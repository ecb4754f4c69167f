#!/usr/bin/env bash
# Builds the wheel and the source distribution, and installs each in an environment of its own,
# where the command line and README's first program run without the repository in sight.
set -euo pipefail
python=$(command -v "${1:-python3}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

# From a copy: a build leaves folders behind.
mkdir "$work/source"
git -C "$root" ls-files -z | tar -C "$root" --null -T - -cf - | tar -C "$work/source" -xf -
"$python" -m venv "$work/build"
"$work/build/bin/pip" install -qq build
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/source" > "$work/build.log" \
  || { cat "$work/build.log"; exit 1; }

awk '/^```python/ { inside = 1; next } /^```/ { if (inside) exit } inside' "$root/README.md" \
  > "$work/first.py"
grep -q make_private "$work/first.py"
for built in "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
  echo "installing ${built##*/}"
  "$python" -m venv --clear "$work/venv"
  "$work/venv/bin/pip" install -qq "$(grep '^torch==' "$root/constraints.txt")"
  "$work/venv/bin/pip" install -qq -c "$root/constraints.txt" "$built"
  cd "$work"
  "$work/venv/bin/dpflash" doctor
  "$work/venv/bin/dpflash" epsilon --noise-multiplier 1 --sample-rate 0.01 --steps 100 --delta 1e-5
  "$work/venv/bin/python" first.py
done
