# Sourced by the batch scripts. Settings, all optional:
#   MPPO_ROOT            the repository; default: the folder of the sbatch call
#   MPPO_PYTHON          interpreter; default: $MPPO_ROOT/.venv/bin/python, else python3
#   MPPO_CONTAINER       run inside it: a .sif file (apptainer) or an image name (pyxis)
#   MPPO_RANKS_PER_NODE  processes per node; default: the node's GPUs, else 1
#   MPPO_LAUNCH          torchrun (one task per node), srun (one task per rank) or mpi (the same,
#                        ranks from mpi4py; needs an MPI with PMI2, such as MPICH)
#   MPPO_PREFLIGHT       0 skips the checks before the run
#   MPPO_PREFLIGHT_S     seconds for each check of the nodes; default 60. The recipe's has no limit
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds that torchrun gives the ranks to save after SIGTERM; default 300
#   MPPO_MAX_REQUEUES    largest number of restarts of the job; default 100
#   MPPO_ENTRY           the program that trains; default mppo/train.py

mppo_die() { echo "mppo: $*" >&2; exit 1; }

# a node's name need not be in DNS; Slurm knows its address
mppo_address() { scontrol show node -o "$1" | sed -E 's/.*NodeAddr=([^ ]+).*/\1/'; }

mppo_setup() {
  cd "${MPPO_ROOT:-${SLURM_SUBMIT_DIR:-.}}" || mppo_die "no folder ${MPPO_ROOT:-$SLURM_SUBMIT_DIR}"
  [ -f mppo/train.py ] || mppo_die "submit from the repository, or set MPPO_ROOT to it"
  MPPO_ROOT=$PWD
  if [ -z "${MPPO_PYTHON:-}" ]; then
    MPPO_PYTHON=python3
    [ -x .venv/bin/python ] && MPPO_PYTHON=$PWD/.venv/bin/python
  fi
  # the first component of a heterogeneous job trains
  local nodes=${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}
  MPPO_NODES=$(scontrol show hostnames "$nodes" | wc -l)
  MPPO_RANKS_PER_NODE=${MPPO_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
  MPPO_WORLD=$((MPPO_NODES * MPPO_RANKS_PER_NODE))
  local first
  first=$(scontrol show hostnames "$nodes" | head -n 1)
  MASTER_ADDR=$(mppo_address "$first")
  MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
  export MPPO_ROOT MPPO_PYTHON MPPO_RANKS_PER_NODE MASTER_ADDR MASTER_PORT
  # 1: each rank uses its share of the node's cores (mppo/parallel/device.py). It binds itself to those
  # near its GPU (mppo/parallel/node.py); Slurm's own binding does not know which GPU a rank uses.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
  MPPO_SRUN=(srun --kill-on-bad-exit=1 --cpu-bind=none)
  [ "${SLURM_HET_SIZE:-1}" -gt 1 ] && MPPO_SRUN+=(--het-group=0)
  # srun does not inherit sbatch's --cpus-per-task (Slurm 22.05 and newer)
  [ -n "${SLURM_CPUS_PER_TASK:-}" ] && MPPO_SRUN+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  MPPO_INSIDE=()
  case "${MPPO_CONTAINER:-}" in
    "") ;;
    *.sif) MPPO_INSIDE=(apptainer exec --nv --bind "$MPPO_ROOT" "$MPPO_CONTAINER") ;;
    *) MPPO_SRUN+=(--container-image="$MPPO_CONTAINER"
                   --container-mounts="$MPPO_ROOT:$MPPO_ROOT" --container-workdir="$MPPO_ROOT") ;;
  esac
  # once, on this node: only srun enters a pyxis container
  MPPO_HERE=("${MPPO_INSIDE[@]}")
  [[ "${MPPO_SRUN[*]}" != *--container-image=* ]] ||
    MPPO_HERE=("${MPPO_SRUN[@]}" --overlap --nodes=1 --ntasks=1)
}

# Resources of each node. Slurm's defaults are one CPU per task and a share of the memory.
mppo_resources() {
  local cpus=${SLURM_CPUS_ON_NODE:-$(nproc)} memory=${SLURM_MEM_PER_NODE:-}
  [ -n "$memory" ] || [ -z "${SLURM_MEM_PER_CPU:-}" ] || memory=$((SLURM_MEM_PER_CPU * cpus))
  [ "${memory:-0}" = 0 ] && memory="all or the partition's default" || memory="$memory MB"
  echo "mppo: a node gives $cpus CPUs, ${SLURM_GPUS_ON_NODE:-0} GPUs, memory: $memory"
  [ "${SLURM_GPUS_ON_NODE:-0}" = 0 ] || [ "$cpus" -ge $((2 * MPPO_RANKS_PER_NODE)) ] ||
    echo "mppo: $cpus CPUs for $MPPO_RANKS_PER_NODE ranks and their SGLang servers: ranks will wait" \
      "for each other; add --cpus-per-task=$((8 * MPPO_RANKS_PER_NODE)) to sbatch" >&2
}

# Set MPPO_COMMAND to run a command once per node, ...
mppo_per_node() {
  MPPO_COMMAND=("${MPPO_SRUN[@]}" --nodes="$MPPO_NODES" --ntasks="$MPPO_NODES"
    --ntasks-per-node=1 "${MPPO_INSIDE[@]}" "$@")
}

# ... once per rank, ...
mppo_per_rank() {
  MPPO_COMMAND=("${MPPO_SRUN[@]}" --nodes="$MPPO_NODES" --ntasks="$MPPO_WORLD"
    --ntasks-per-node="$MPPO_RANKS_PER_NODE" --overcommit "${MPPO_INSIDE[@]}" "$@")
}

# ... or to run a Python script on every rank, by MPPO_LAUNCH.
mppo_per_launcher() {
  case "${MPPO_LAUNCH:-torchrun}" in
    torchrun) mppo_per_node bash slurm/node.sh "$@" ;;
    srun) mppo_per_rank "$MPPO_PYTHON" "$@" ;;
    mpi)
      mppo_per_rank "$MPPO_PYTHON" "$@"
      MPPO_COMMAND=(srun --mpi=pmi2 "${MPPO_COMMAND[@]:1}")
      ;;
    *) mppo_die "MPPO_LAUNCH=$MPPO_LAUNCH: choose torchrun, srun or mpi" ;;
  esac
}

# The second component of a heterogeneous job serves: start one SGLang server on each of its nodes.
# MPPO_SERVED is set to the recipe keys with which the run uses them.
mppo_serve() {
  MPPO_SERVED=()
  [ "${SLURM_HET_SIZE:-1}" -gt 1 ] || return 0
  local port=$((MASTER_PORT + 10000)) node address urls=
  MPPO_ROLLOUT_API_KEY=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
  export MPPO_ROLLOUT_API_KEY
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"); do
    address=$(mppo_address "$node")
    urls+="${urls:+, }http://$address:$port"
    "${MPPO_SRUN[@]}" --het-group=1 --nodes=1 --ntasks=1 --nodelist="$node" "${MPPO_INSIDE[@]}" \
      "$MPPO_PYTHON" -m mppo.serve --empty --host "$address" --port "$port" --config "$@" &
  done
  MPPO_SERVED=(rollout.name=sglang rollout.mode=disaggregated rollout.sync=distributed
    "rollout.urls=[$urls]")
}

# Check the recipe, then every node, then a collective, the last two with a time limit. The recipe's
# check may download models.
mppo_preflight() {
  [ "${MPPO_PREFLIGHT:-1}" = 0 ] && return 0
  local seconds=${MPPO_PREFLIGHT_S:-60}
  "${MPPO_HERE[@]}" "$MPPO_PYTHON" -m mppo.preflight recipe --world-size "$MPPO_WORLD" \
    --config "$@" || return $?
  mppo_per_node timeout "$seconds" "$MPPO_PYTHON" -m mppo.preflight collect \
    --ranks "$MPPO_RANKS_PER_NODE" --port "$MASTER_PORT"
  "${MPPO_COMMAND[@]}" |
    "${MPPO_HERE[@]}" "$MPPO_PYTHON" -m mppo.preflight judge --nodes "$MPPO_NODES" || return $?
  [ "$MPPO_WORLD" -gt 1 ] || return 0
  mppo_per_launcher slurm/allreduce.py
  timeout "$seconds" "${MPPO_COMMAND[@]}" || {
    echo "mppo: the ranks could not all-reduce within $seconds s" >&2
    return 1
  }
}
