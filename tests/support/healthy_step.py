"""The metrics that warnings read, of a step that none warns about."""

HEALTHY = {
    "objective/kl": 2.0,
    "response_length/mean": 100.0,
    "policy/entropy_avg": 0.8,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "critic/score/equal_groups": 0.4,
    "response_length/clip_ratio": 0.1,
    "critic/vf_loss": 0.3,
    "critic/vf_explained_var": 0.6,
    "training/rollout_logprob_diff_mean": 0.004,
    "training/skipped_steps": 1.0,
    "actor/moe/layer_3/min_vio": -0.5,
    "timing_s/step": 10.0,
    "timing_s/gen": 6.0,
    "timing_s/log_probs": 2.0,
    "timing_s/old_log_prob": 2.0,
    "timing_s/update": 2.0,
    **{f"perf/rank_probe_ms/{rank}": 1.0 + rank / 100 for rank in range(4)},
}
