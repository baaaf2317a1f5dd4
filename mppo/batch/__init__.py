"""The values that the stages of a PPO iteration pass on.

Prompt -> Episode -> Batch -> Outputs -> Experience. Each type holds the one before it; no stage
adds a field to its argument. A MiniBatch holds the sequences of one optimizer step and their loss.
"""
