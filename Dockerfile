# mppo on a CPU, with the versions that the tests run with:
#   docker build -t mppo .
#   docker run --rm -v "$PWD/runs:/work/runs" mppo
# trains recipes/demo.yaml on two processes. It has not been built: docs/what_was_run.md.
FROM python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# PyTorch's wheels for CPUs are a tenth of PyPI's, which bring CUDA.
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY . /opt/mppo
RUN pip install -c /opt/mppo/constraints.txt "/opt/mppo[cpu,agents,rewards,parquet,trackers]" \
    /opt/mppo/extras/simulate /opt/mppo/extras/migrate \
    && cp -r /opt/mppo/recipes /opt/mppo/slurm /srv/ \
    && rm -rf /opt/mppo

# Nothing of a run needs root.
RUN useradd --create-home --uid 1000 mppo && mkdir -p /work/runs && chown -R mppo /work
USER mppo
WORKDIR /work
CMD ["torchrun", "--standalone", "--shutdown-timeout", "300", "--nproc_per_node=2", \
     "-m", "mppo.train", "--config", "/srv/recipes/demo.yaml"]
