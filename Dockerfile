# An image with hf_lohan and TRL, for a CPU or an NVIDIA GPU. Its commands were run with Python 3.12 outside Docker. It has not been built
# by Docker on a machine of the project: tell us what fails.
#
#   docker build -t hf-lohan .                                  # CUDA: PyPI's torch brings its own CUDA libraries
#   docker build -t hf-lohan:cpu --build-arg TORCH_INDEX=URL .  # URL: PyTorch's index of CPU builds
#   docker run --rm --gpus all --ulimit memlock=-1 --shm-size 16g -v /mnt/nvme0/lohan:/store -v "$PWD":/work hf-lohan lohan doctor
#
# Mount an NVMe drive for the store: files within the image lie on the overlay file system, which is slow. `memlock` lets pinned memory be
# allocated, and ranks on one machine share /dev/shm. `lohan doctor` says what is missing.
FROM python:3.12-slim
ARG TORCH_INDEX=
# Triton compiles the code that starts its kernels, when they first run.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hf-lohan
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11,<2.16"
COPY pyproject.toml README.md LICENSE ./
COPY hf_lohan hf_lohan
RUN pip install --no-cache-dir ".[trl]"
WORKDIR /work
CMD ["lohan", "doctor"]
