"""Models that SGLang finds without importing all of its own (``SGLANG_EXTERNAL_MODEL_PACKAGE``)."""
