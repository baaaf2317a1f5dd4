#!/bin/bash
# One node of a job: torchrun for this node's ranks. SIGUSR1 (save, then requeue) is passed on to the
# ranks; torchrun ignores it, because it would end them.
set -u
# torchrun's --shutdown-timeout as a variable, which older versions ignore: the time that the ranks
# have to save after SIGTERM. Slurm itself kills them KillWait (30 s) after its own SIGTERM.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
command=("$MPPO_PYTHON" -m torch.distributed.run
  --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID"
  --nproc-per-node "$MPPO_RANKS_PER_NODE"
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@")

trap 'tell_ranks USR1' USR1
trap : TERM # Slurm signals torchrun too; wait for its status
(trap '' USR1; exec "${command[@]}") &
agent=$!

# the ranks are torchrun's children
tell_ranks() {
  local pid
  for pid in $(ps -o pid= --ppid "$agent"); do kill -"$1" "$pid" 2>/dev/null; done
}

# a trap interrupts wait: repeat until torchrun has ended, then get its status
while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
wait "$agent"
