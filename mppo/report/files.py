"""Names of a report's files and folders in the run folder."""

RECIPE, METRICS, SAMPLES = "recipe.yaml", "metrics.jsonl", "samples.jsonl"
PAGE, PLOT, EXPERT_LOAD = "report.html", "reward_kl.png", "expert_load.png"
CALIBRATION = "value_calibration.png"
TIMELINES, NONFINITE, CODE = "timeline", "nonfinite", "code"
