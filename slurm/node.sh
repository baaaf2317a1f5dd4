#!/bin/bash
# One node of a job: torchrun for this node's ranks. Signal USR1 (save, then requeue) goes on to the
# ranks; torchrun itself ignores it, for it would end them.
set -u
# torchrun's --shutdown-timeout by a name that versions without it pass over: after SIGTERM the ranks
# have so long to save. Slurm itself kills them KillWait (30 s) after its own SIGTERM.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
command=("$MPPO_PYTHON" -m torch.distributed.run
  --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID"
  --nproc-per-node "$MPPO_RANKS_PER_NODE"
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@")

trap 'tell_ranks USR1' USR1
trap : TERM # Slurm tells torchrun as well; stay to report its status
(trap '' USR1; exec "${command[@]}") &
agent=$!

# the ranks are torchrun's children
tell_ranks() {
  local pid
  for pid in $(ps -o pid= --ppid "$agent"); do kill -"$1" "$pid" 2>/dev/null; done
}

# a trap interrupts wait: go on until torchrun has ended, then take its status
while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
wait "$agent"
