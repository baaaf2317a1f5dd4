"""Names of a run's files and folders in the run folder."""

RECIPE, METRICS, SAMPLES = "recipe.yaml", "metrics.jsonl", "samples.jsonl"
STATUS, EVENTS, TRACKER_IDS = "status.json", "events.jsonl", "trackers.json"
REPORT, PAGE, PLOT, EXPERT_LOAD = "report.md", "report.html", "reward_kl.png", "expert_load.png"
CALIBRATION = "value_calibration.png"
TIMELINES, NONFINITE, CODE = "timeline", "nonfinite", "code"
