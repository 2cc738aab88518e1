#!/usr/bin/env bash
# The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and the portable ones on an emulated Arm where
# gcc-aarch64-linux-gnu and qemu-user are installed.
set -euo pipefail
cd "$(dirname "$0")"
out=$(mktemp -d)
sources="check_kernels.c $(ls ../inro_fx/kernels/*.c | grep -v -e operators.c -e tensors.c)"         # whose functions are torch's
trap 'rm -rf "$out"' EXIT
gcc -O1 -g -fopenmp -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=undefined $sources -o "$out/native" -lm
ASAN_OPTIONS=detect_leaks=1 "$out/native"
if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then
    aarch64-linux-gnu-gcc -O3 -fopenmp -ffp-contract=off -static $sources -o "$out/arm" -lm
    qemu-aarch64 "$out/arm"
else
    echo "no Arm: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
fi
