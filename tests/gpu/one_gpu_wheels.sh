#!/bin/bash
# Wheels for tests/gpu/one_gpu.sh on a machine that has torch for CUDA 13, transformers and pytest:
#   tests/gpu/one_gpu_wheels.sh DIR [PYTHON_VERSION]
set -eu
folder=$1
version=${2:-3.12}
mkdir -p "$folder"
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$folder" \
  megatron-core==0.16.1 pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.7.0 \
  typing-inspection==0.4.2 orjson==3.11.4
du -sh "$folder"
